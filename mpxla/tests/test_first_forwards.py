"""What a forward sets up once, by a flag, is there once, however often the step is captured.

transformers registers hooks so, to collect hidden states.
"""

import functools

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import close, host
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 3


class Twice:
    """Doubles what a function gives."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return 2 * self.function(*args)


class TwiceByTensor(Twice):
    """Doubles with a tensor that it makes, so that a step that makes it keeps it."""

    def __init__(self, function):
        super().__init__(function)
        self.factor = torch.full((4,), 2.0)

    def __call__(self, *args):
        return self.factor * self.function(*args)


class SetUp(nn.Module):
    """Something doubles what its first layer gives, and so counts how often it was set up."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.others, self.function = nn.ModuleList(), torch.tanh
        self.way, self.is_ready = way, False

    def forward(self, x):
        if not self.is_ready:
            getattr(self, self.way)()
            self.is_ready = True
        h = self.first(x)
        for other in self.others:
            h = 2 * other(h)
        return self.last(self.function(h))

    def add_hook(self):
        self.first.register_forward_hook(lambda module, args, result: 2 * result)

    def add_layer(self):
        self.others.append(nn.Softsign())

    def wrap_forward(self):
        self.first.forward = Twice(self.first.forward)

    def wrap_function(self):
        self.function = functools.partial(lambda f, x: 2 * f(x), self.function)

    def wrap_made(self):
        self.made = TwiceByTensor(getattr(self, "made", torch.tanh))
        self.function = self.made


def plain_loss(model, x):
    return model(x).square().mean()


def after_inputs(model, x):
    """Is captured again with the values of its inputs, which Python needs."""
    loss = model(x).square().mean()
    return loss if (x > -100).all() else 2 * loss


def by_the_model(model, x):
    """Is captured for each question and way."""
    y = model(x)
    loss = y.square().mean()
    return loss if y.sum().item() > 0 else 3 * loss


def batch(number):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def train(way, loss_of):
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(SetUp(way))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model, x):
        loss = loss_of(model, x)
        model.backward(loss)
        return loss

    losses = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(step(model, batch(number)).reduce_mean().item())
        optimizer.step()
    hooks, others = model.module.first._forward_hooks, model.module.others
    return losses, host(model.state_dict().items()), (len(hooks), len(others))


WAYS = ("add_hook", "add_layer", "wrap_forward", "wrap_function")
FAST = [("add_hook", by_the_model), ("add_layer", after_inputs), ("wrap_forward", after_inputs)]
CASES = [
    pytest.param(way, loss_of, marks=[pytest.mark.slow] * ((way, loss_of) not in FAST))
    for way in WAYS
    for loss_of in (plain_loss, after_inputs, by_the_model)
]
CASES += [
    pytest.param("wrap_made", plain_loss),
    pytest.param("wrap_made", after_inputs, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("way, loss_of", CASES)
def test_is_there_once(way, loss_of):
    model = SetUp(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(model, x) / 2 for x in batch(number).chunk(2))
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
    ((losses, state, found),) = run_ranks(train, 1, way, loss_of)
    assert found == (way == "add_hook", way == "add_layer")
    assert losses == pytest.approx(expected, rel=1e-5)
    close(state, host(model.state_dict().items()))
