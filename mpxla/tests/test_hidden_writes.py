"""Writes that autograd does not see have the values and gradients that they have in PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def under_no_grad(model, y):
    with torch.no_grad():
        y.mul_(0.5)
        torch.relu_(y)
        y += 1
    return y


def to_views(model, y):
    with torch.no_grad():
        y[:, 0].zero_()
        y[1] = 2.0
        y.t()[2, :2].add_(y[:2, 3])
        y[y[:, 1].argmax()] = 0.5
    return y


def to_data(model, y):
    y.data.clamp_(-0.1, 0.1)
    y.data[:, 1] = 0.3
    y.detach().mul_(2)
    return y


def added(model, y):
    with torch.no_grad():
        y.add_(1).sub_(y.mean(), alpha=2)
        model.last.weight.add_(model.last.bias.mean(), alpha=0.1)
    y.data.addcmul_(y.data, y.data, value=0.1)
    y.detach().add_(model.first.bias)
    model.last.bias.data.sub_(0.1)
    return y


def copied_widely(model, y):
    """What is copied is wider or narrower in its shape or dtype."""
    model.scale.copy_(y[0, :1].detach().double())
    y.data[1:].copy_(y.data[0])
    return y * model.scale


def other_data(model, y):
    """As the activations of binary networks do it."""
    y.data = y.data.sign()
    return y * model.last.weight.data.sign().mean()


def detached_in_place(model, y):
    return (y * 2).detach_() + y


def buffers(model, y):
    model.scale.data.mul_(0.5)
    model.shift.data = model.shift.data + model.last.weight.data.mean()
    return y * model.scale + model.shift


def shared_memory(model, y):
    """A parameter gets the memory of activations, and is written to then."""
    row = y[0] * 2
    model.first.bias.data = row.detach()
    model.first.bias.data[1] = row.mean()
    with torch.no_grad():
        model.last.bias.data = y[1].detach()
        model.last.bias[:2].mul_(2)
    return torch.tanh(y * row + model.first.bias)


def other_data_with_a_hook(model, y):
    """A parameter that has a hook on its gradient gets other data after its use."""
    y = model.hooked(y)
    model.hooked.weight.data = model.hooked.weight.data.clamp(-0.2, 0.2)
    return y


def set_to_another(model, y):
    """By a method that torch's function modes do not see."""
    with torch.no_grad():
        model.last.bias.set_(y.mean(0).detach())
        model.shift.set_(model.shift + 1)
    return y + model.shift * model.first.bias


class Shifted(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, weight):
        return weight + self.by


def parametrized_for_a_while(model, y):
    """As adapters of parameters do it in every forward; torch sets the parameter to itself."""
    delta = model.first.weight * 0.5
    parametrize.register_parametrization(model.last, "weight", Shifted(delta))
    try:
        with parametrize.cached():
            return y + model.last(y)
    finally:
        parametrize.remove_parametrizations(model.last, "weight", leave_parametrized=False)


FUNCTIONS = [
    under_no_grad,
    to_views,
    to_data,
    added,
    copied_widely,
    other_data,
    detached_in_place,
    buffers,
    shared_memory,
    other_data_with_a_hook,
    set_to_another,
    parametrized_for_a_while,
]


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function
        self.hooked = nn.Linear(4, 4)
        self.hooked.weight.register_hook(lambda gradient: gradient * 0.5)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))


def expected(function):
    model = Model(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for x in X.chunk(2):
            (model(x).square().mean() / 2).backward()
        optimizer.step()
    return model.state_dict()


def train(num_stages, functions):
    smp.init({"microbatches": 2, "pipeline_parallel_degree": num_stages})

    @smp.step
    def step(model, x):
        model.backward(model(x).square().mean())

    found = []
    for function in functions:
        model = smp.DistributedModel(Model(function))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            step(model, X)
            optimizer.step()
        found.append({name: value.cpu() for name, value in model.state_dict().items()})
    return found


@pytest.mark.parametrize(
    ("num_stages", "functions"),
    [
        (1, [under_no_grad, added, copied_widely, other_data, buffers, shared_memory]),
        (1, [other_data_with_a_hook, set_to_another, parametrized_for_a_while]),
        *(pytest.param(stages, FUNCTIONS, marks=pytest.mark.slow) for stages in (1, 2)),
    ],
)
def test_values_and_gradients(num_stages, functions):
    for states in run_ranks(train, num_stages, num_stages, functions):
        for function, state in zip(functions, states, strict=True):
            torch.testing.assert_close(state, expected(function), msg=function.__name__)
