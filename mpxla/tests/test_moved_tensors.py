"""Tensors that a step moves between buffers and attributes, or returns as they were."""

from functools import partial

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.backends import on_few_all_and_stages
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

MICROBATCHES = 2
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
NAMES = ("u", "v", "a", "b", "left", "before", "now")


def attributes_swapped(net, _):
    net.a, net.b = net.b, net.a
    return net.a, net.b


def buffers_swapped(net, x):
    net.u, net.v = net.v, net.u
    net.v.add_(x.mean(0))
    return net.u, net.v


def buffer_and_attribute_swapped(net, _):
    net.u, net.a = net.a, net.u
    return net.u, net.a


def attributes_of_a_parameter_swapped(net, _):
    weight = net.last.weight
    weight.u, weight.v = weight.v, weight.u
    return weight.u, weight.v


def buffers_copied(net, x):
    net.u.copy_(net.v)
    net.v.copy_(x.mean(0))
    return net.u, net.v


def moved_on(net, x):
    net.u, net.v, net.a, net.b = net.v, net.a, net.b, x.mean(0)
    return net.u, net.a


def old_buffer_returned(net, x):
    before, net.u = net.u, x.mean(0)
    return net.u, before


def part_of_an_old_attribute_returned(net, x):
    before, net.a = net.a[1:], net.a + x.mean(0)
    return net.a, before


def buffer_returned_and_written_to(net, x):
    before, net.u = net.u, net.u + x.mean(0)
    net.u.mul_(0.5)
    before.add_(1)
    return net.u, before


def only_left(net, x):
    net.left, net.u = net.u, net.u + x.mean(0)
    return net.u, net.left


def one_before(net, x):
    net.before, net.now = net.now, x.mean(0)
    return net.now - (0 if net.before is None else net.before), net.now


def one_before_and_a_count(net, x):
    net.count += 1
    shift, last = one_before(net, x)
    return shift * net.count, last


def constant_before_and_a_count(net, _):
    net.before, net.now = net.now, torch.ones(4)
    net.count += 1
    return net.now - (0 if net.before is None else net.before / net.count), net.now


def parameter_returned(net, _):
    weight = net.last.weight
    return net.u, torch.stack([weight[0].clone(), net.v])


def copy_of_a_parameter_returned(net, _):
    return net.u, net.last.weight.detach().to(torch.float32, copy=True)


def parameter_left(net, _):
    net.left = net.last.weight[0].detach().clone()
    return net.v, net.last.weight.clone()


FEW = (
    *(attributes_swapped, buffers_swapped, attributes_of_a_parameter_swapped),
    *(old_buffer_returned, buffers_copied, only_left, one_before_and_a_count),
)
ALL = (
    *(*FEW, buffer_and_attribute_swapped, moved_on, part_of_an_old_attribute_returned),
    *(buffer_returned_and_written_to, one_before, constant_before_and_a_count),
    *(parameter_returned, copy_of_a_parameter_returned, parameter_left),
)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.count = function, 0
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.last.weight.u, self.last.weight.v = torch.zeros(4), torch.ones(4)
        self.register_buffer("u", torch.zeros(4))
        self.register_buffer("v", torch.ones(4))
        self.a, self.b = torch.full((4,), 0.5), torch.full((4,), -1.0)
        self.left = self.before = self.now = None

    def forward(self, x):
        hidden = self.first(x)
        shift, returned = self.function(self, hidden.detach())
        return self.last(hidden + shift), returned


def batch(number):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def look(net):
    """The numbers of what is there, on the rank that has it."""
    found = {name: getattr(net, name) for name in NAMES}
    has_numbers = {n: v is not None and v.device.type != "meta" for n, v in found.items()}
    return {n: v.tolist() for n, v in found.items() if has_numbers[n]}


def step_of(model, x):
    predicted, returned = model(x)
    loss = predicted.square().mean()
    model.backward(loss)
    return loss, returned


def expected(function):
    net, seen = Net(function), []
    net.backward = lambda loss: (loss / MICROBATCHES).backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        for part in batch(number).chunk(MICROBATCHES):
            seen += [value.tolist() for value in step_of(net, part)]
        optimizer.step()
        seen.append(look(net))
    return seen


def trained(stages, functions):
    smp.init({"microbatches": MICROBATCHES, "pipeline_parallel_degree": stages})
    step, found = smp.step(step_of), []
    for function in functions:
        net, seen = Net(function), []
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(3):
            optimizer.zero_grad()
            results = zip(*(one.outputs for one in step(model, batch(number))), strict=True)
            optimizer.step()
            seen += [value.tolist() for pair in results for value in pair]  # as before the update
            seen.append(look(net))
        found.append(seen)
    return found


@on_few_all_and_stages(FEW, ALL)
def test_they_are_what_they_are_in_pytorch(stages, functions, env):
    for results in run_ranks(trained, stages, stages, functions, env=env):
        for function, seen in zip(functions, results, strict=True):
            for found, wanted in zip(seen, expected(function), strict=True):
                if isinstance(wanted, dict) and stages > 1:  # others are on another rank
                    wanted = {name: wanted[name] for name in found}
                close(found, wanted, msg=lambda m, f=function: f"{f.__name__}: {m}")
