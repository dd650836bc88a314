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


def wrong():
    return nn.Linear(1, 1)


NOT_A_FUNCTION = 3
