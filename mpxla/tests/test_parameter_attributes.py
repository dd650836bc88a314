"""Attributes that scripts set on parameters, which a step reads of what stands for these."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

STEPS, MICROBATCHES = 4, 2


class Marked(nn.Module):
    """Which parameters decay, and how much, is said by marks on them; one counts its calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.first.bias._no_decay = self.last.bias.no_decay = True
        self.first.weight._calls = 0
        self.last.weight.scale = 3.0
        self.last.weight._mask = (torch.arange(24).view(3, 8) % 3 > 0).float()

    def forward(self, x, y):
        self.first.weight._calls += 1
        weight = self.last.weight * self.last.weight._mask
        loss = F.cross_entropy(F.linear(torch.relu(self.first(x)), weight, self.last.bias), y)
        for parameter in self.parameters():
            if not getattr(parameter, "_no_decay", False) and not hasattr(parameter, "no_decay"):
                loss = loss + 0.1 * getattr(parameter, "scale", 1.0) * parameter.pow(2).sum()
        return loss * self.first.weight._calls


def batch_of(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 6, generator=generator)
    return x, torch.randint(0, 3, (8,), generator=generator)


def train(own, model, optimizer, step):
    """Losses, parameters and what the count is in the end."""
    losses = []
    for number in range(STEPS):
        if number == 2:
            own.last.weight.scale = 0.5
            own.first.bias._no_decay = False
        optimizer.zero_grad()
        losses.append(step(model, *batch_of(number)))
        optimizer.step()
    trained = {name: value.cpu() for name, value in model.state_dict().items()}
    return losses, trained, own.first.weight._calls


@smp.step
def train_step(model, x, y):
    loss = model(x, y)
    model.backward(loss)
    return loss


def captured(num_stages):
    smp.init({"microbatches": MICROBATCHES, "pipeline_parallel_degree": num_stages})
    model = smp.DistributedModel(Marked())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))

    def step(model, x, y):
        return train_step(model, x, y).reduce_mean().item()

    return train(model.module, model, optimizer, step)


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_marks_on_parameters(num_stages):
    def one_by_one(model, x, y):
        losses = [model(*part) / MICROBATCHES for part in zip(x.chunk(2), y.chunk(2), strict=True)]
        sum(losses).backward()
        return sum(loss.item() for loss in losses)

    model = Marked()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses, trained, calls = train(model, model, optimizer, one_by_one)
    for found, values, counted in run_ranks(captured, num_stages, num_stages):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses))
        torch.testing.assert_close(values, trained)
        assert counted == calls
