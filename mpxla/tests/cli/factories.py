"""What the commands are pointed at in tests."""

import torch
from torch import nn

from mpxla.tests.models import Gpt, predict_tokens, tokens


def gpt():
    torch.manual_seed(0)
    return Gpt(), (tokens(2),), predict_tokens


def chain_with_loss():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    return model, torch.zeros(4, 16), lambda out: out.square().mean()


def widening_chain():
    """Most of its memory is activations."""
    layers = [nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)] * 2
    return nn.Sequential(*layers), torch.zeros(64, 16), lambda out: out.square().mean()


class Pairs(nn.Module):
    """A chain whose pairs of layers can be split over ranks."""

    _tp_plan = {"pairs.*.up": "colwise", "pairs.*.down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 64), "down": nn.Linear(64, 16)}) for _ in range(2)
        )

    def forward(self, x):
        for pair in self.pairs:
            x = pair["down"](torch.tanh(pair["up"](x)))
        return x


def pairs():
    return Pairs(), torch.zeros(4, 16), lambda out: out.square().mean()


def wrong():
    return nn.Linear(1, 1)


NOT_A_FUNCTION = 3
