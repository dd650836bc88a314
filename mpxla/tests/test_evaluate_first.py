"""Buffers that a training step changes, where evaluations come before it or after it.

A buffer lives on one stage of a pipeline; steps with other graphs have to find it there.
"""

import copy

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.wrong_uses import evaluate, train

pytestmark = pytest.mark.ranks


class Cumulative(nn.Module):
    """Batch norms that average over all batches so far."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential()
        for _ in range(3):
            self.layers.extend([nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh()])

    def forward(self, x):
        return self.layers(x)


class Observed(nn.Module):
    """Layers that follow the mean of what they get; evaluations read it if asked to."""

    def __init__(self, reads):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.reads = reads
        for i in range(4):
            self.register_buffer(f"mean{i}", torch.full((6,), 0.1 * i))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            mean = getattr(self, f"mean{i}")
            if self.training:
                with torch.no_grad():
                    mean.mul_(0.75).add_(x.mean(0), alpha=0.25)
            elif self.reads:
                x = x - mean
            x = torch.tanh(layer(x))
        return x


def build(name):
    torch.manual_seed(4)
    return {"cumulative": Cumulative, "unread": lambda: Observed(False)}.get(
        name, lambda: Observed(True)
    )()


def batch(number):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


ORDERS = {"evaluated first": "etete", "trained first": "tette"}


def run(name, order, config):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    model = smp.DistributedModel(build(name))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    results = []
    for number, letter in enumerate(ORDERS[order]):
        model.train(letter == "t")
        if letter == "t":
            optimizer.zero_grad()
            results.append(train(model, batch(number)).stack())
            optimizer.step()
        else:
            results.append(evaluate(model, batch(number)).concat())
    return [r.detach().cpu() for r in results], model.state_dict()


def plain(name, order):
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for number, letter in enumerate(ORDERS[order]):
        model.train(letter == "t")
        if letter == "t":
            optimizer.zero_grad()
            losses = [model(x).square().mean() for x in batch(number).chunk(2)]
            torch.stack(losses).mean().backward()
            optimizer.step()
            results.append(torch.stack(losses).detach())
        else:
            with torch.no_grad():
                results.append(model(batch(number)))
    return results, copy.deepcopy(model.state_dict())


INTERLEAVED = {"virtual_pipeline_degree": 2}
CASES = [
    ("unread", "evaluated first", {}),
    *(
        pytest.param(name, order, config, marks=pytest.mark.slow)
        for name in ("cumulative", "unread", "read")
        for order in ORDERS
        for config in ({}, INTERLEAVED)
    ),
]


@pytest.mark.parametrize(("name", "order", "config"), CASES)
def test_numbers_are_those_of_plain_pytorch(name, order, config):
    expected, state = plain(name, order)
    for results, values in run_ranks(run, 2, name, order, config):
        for result, own in zip(results, expected, strict=True):
            torch.testing.assert_close(result, own)
        assert list(values) == list(state)
        for key, value in state.items():
            torch.testing.assert_close(values[key].cpu(), value, msg=key)
