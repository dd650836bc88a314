"""Masks and ends of slices that are buffers, which say how many columns there are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

MICROBATCHES = 2


class Coupling(nn.Module):
    """As in NICE and RealNVP; with a mask that is written to, or replaced, and decides nothing."""

    def __init__(self, mask, replaces=False):
        super().__init__()
        self.replaces = replaces
        self.register_buffer("mask", torch.tensor(mask).bool())
        self.register_buffer("seen", torch.zeros(4).bool())
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        if self.training and self.replaces:
            self.seen = self.seen | (x.mean(0) > 0)
        elif self.training:
            self.seen.logical_or_(x.mean(0) > 0)
        kept, others = x[:, self.mask], x[:, ~self.mask]
        out = torch.empty_like(x)
        out[:, self.mask], out[:, ~self.mask] = kept, others + self.net(kept)
        return out * (1 + self.seen.to(x.dtype))


class Grouped(nn.Module):
    """A layer for each group of columns, whose ends are a buffer, beside one that is written to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ends", torch.tensor([0, 1, 4]))
        self.register_buffer("seen", torch.tensor([0, 0]))
        self.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(3, 3)])

    def forward(self, x):
        self.seen += torch.tensor([1, 2])
        out = torch.zeros_like(x)
        for i, layer in enumerate(self.layers):
            here = slice(self.ends[i], self.ends[i + 1])
            out[:, here] = layer(x[:, here])
        return out * self.seen[1]


def make_model():
    torch.manual_seed(0)
    couplings = Coupling([1, 0, 1, 0]), Coupling([0, 1, 0, 1], True)
    return nn.Sequential(*couplings, Grouped(), nn.Linear(4, 3)).double()


def batches():
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(8, 4, generator=generator).double(),
            torch.randint(3, (8,), generator=generator),
        )
        for _ in range(6)
    ]


def loop(own, model, optimizer, step):
    """Losses and the state of a training that changes masks in three ways."""
    losses = []
    for turn, (x, y) in enumerate(batches()):
        if turn == 2:
            own[0].mask.copy_(torch.tensor([0, 0, 1, 1]).bool())
        if turn == 3:
            own[1].mask = torch.tensor([1, 1, 0, 0]).bool()
        if turn == 4:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            state["0.mask"].logical_not_()
            model.load_state_dict(state)
        optimizer.zero_grad()
        losses.append(step(model, x, y))
        optimizer.step()
    return losses, model.state_dict()


def trained_plainly():
    model = make_model()

    def step(model, x, y):
        losses = []
        for part in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = F.cross_entropy(model(part[0]), part[1]) / MICROBATCHES
            loss.backward()
            losses.append(loss.item())
        return sum(losses)

    return loop(model, model, torch.optim.Adam(model.parameters(), lr=0.05), step)


def trained(num_stages):
    smp.init({"microbatches": MICROBATCHES, "pipeline_parallel_degree": num_stages})
    own = make_model()
    model = smp.DistributedModel(own)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))

    @smp.step
    def train(model, x, y):
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    def step(model, x, y):
        return train(model, x, y).reduce_mean().item()

    return loop(own, model, optimizer, step)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_masks_and_ends_in_buffers_decide_sizes(num_stages):
    expected = trained_plainly()
    for found in run_ranks(trained, num_stages, num_stages):
        torch.testing.assert_close(found, expected)
