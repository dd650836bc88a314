"""Buffers that a script has a second time, in attributes, lists, dictionaries and globals."""

from functools import partial

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.tests.backends import on_few_all_and_stages
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

MICROBATCHES = 2
HELD = []
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def read_in_an_attribute(net, x):
    net.mean.add_(x.mean(0))
    return net.same


def written_to_in_an_attribute(net, x):
    net.same.add_(x.mean(0))
    return net.mean


def added_to_in_an_attribute(net, x):
    net.same += x.mean(0)
    return net.mean


def written_to_in_a_list(net, x):
    net.listed[0].mul_(0.5)
    net.listed[0].data.copy_(net.listed[0] + x.mean(0))
    return net.same


def written_to_in_a_global(net, x):
    HELD[0].add_(x.mean(0))
    return net.mean


def filled_by_init(net, x):
    nn.init.constant_(net.listed[0], 0.5)
    return net.mean + net.same


def read_in_a_dictionary(net, x):
    net.norm(x)
    return net.moved["mean"]


def where_it_began(net, x):
    """The attribute keeps the tensor of the start, which the buffer is no more."""
    net.mean = net.mean * 0.5 + x.mean(0)
    return net.mean - net.same


def numbers_in_python(net, x):
    """Nothing writes to it: Python may read its values."""
    return x.mean(0) * float(net.same.sum()) + int(net.listed[0][0])


FEW = (read_in_an_attribute, written_to_in_an_attribute, read_in_a_dictionary, where_it_began)
ALL = (
    *(*FEW, added_to_in_an_attribute, written_to_in_a_list, written_to_in_a_global),
    *(filled_by_init, numbers_in_python),
)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.ones(4))
        self.same, self.listed = self.mean, [self.mean]
        self.moved = {"mean": self.norm.running_mean}
        HELD[:] = [self.mean]

    def forward(self, x):
        hidden = self.first(x)
        shift = self.function(self, hidden.detach())
        return self.last(hidden + shift)


def batch(number):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def evaluation_step(model, x):
    net = model.module if hasattr(model, "module") else model
    return net.last(net.first(x) + net.same + net.moved["mean"])


def run(net, model, train, evaluate, optimizer):
    """Losses and evaluations; one of these comes before training."""
    seen = [evaluate(model, batch(9))]
    for number in range(3):
        optimizer.zero_grad()
        seen += train(model, batch(number))
        optimizer.step()
        seen.append(evaluate(model, batch(9)))
    return seen


def expected(function):
    net = Net(function)
    net.backward = lambda loss: (loss / MICROBATCHES).backward()

    def train(model, x):
        return [train_step(model, part).detach() for part in x.chunk(MICROBATCHES)]

    def evaluate(model, x):
        with torch.no_grad():
            return evaluation_step(model, x)

    return run(net, net, train, evaluate, torch.optim.SGD(net.parameters(), lr=0.1))


def trained(stages, functions):
    smp.init({"microbatches": MICROBATCHES, "pipeline_parallel_degree": stages})
    train, evaluation, found = smp.step(train_step), smp.step(evaluation_step), []

    def evaluate(model, x):
        with torch.no_grad():
            return evaluation(model, x).concat()

    for function in functions:
        net = Net(function)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        seen = run(net, model, lambda m, x: train(m, x).outputs, evaluate, optimizer)
        found.append([value.cpu() for value in seen])
    return found


@on_few_all_and_stages(FEW, ALL)
def test_they_are_one_tensor(stages, functions, env):
    for results in run_ranks(trained, stages, stages, functions, env=env):
        for function, seen in zip(functions, results, strict=True):
            for found, wanted in zip(seen, expected(function), strict=True):
                close(found, wanted, msg=lambda m, f=function: f"{f.__name__}: {m}")


def kept():
    smp.init({"microbatches": MICROBATCHES})
    net = Net(read_in_an_attribute)
    model, step, found = smp.DistributedModel(net), smp.step(train_step), []
    for number in range(2):
        step(model, batch(number))
        found.append([tensor.tolist() for tensor in (net.mean, net.same, net.listed[0])])
    return found


@pytest.mark.slow
def test_what_a_script_holds_has_the_numbers():
    ((first, second),) = run_ranks(kept, 1)
    for mean, same, listed in (first, second):
        assert mean == same == listed
    assert first[0] != second[0]


class Parts(nn.Module):
    """Buffers that share memory in ways that no distributed model keeps."""

    def __init__(self, function):
        super().__init__()
        self.function, self.last = function, nn.Linear(4, 2)
        self.register_buffer("whole", torch.zeros(8))
        self.register_buffer("part", self.whole[:4])
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("twin", self.mean)
        self.few, self.same = self.mean[:2], self.mean

    def forward(self, x):
        return self.last(x + self.function(self, x))


def write_to_the_whole(net, x):
    net.whole.add_(1)
    return x * net.part


def write_to_what_has_a_view(net, x):
    net.mean.add_(1)
    return x * net.few.sum()


def assign_to_one(net, x):
    net.mean = net.mean + 1
    return x * net.twin


def assign_after_a_write(net, x):
    net.mean.add_(1)
    net.mean = net.twin = net.mean * 2
    return x * net.same


WRONG = {
    write_to_the_whole: r"writes in place to the buffer \S*whole, which shares memory with the "
    r"buffer \S*part: in a distributed model each has memory of its own",
    write_to_what_has_a_view: r"the buffer \S*mean, which shares memory with a tensor of shape "
    r"\[2\] that the step function uses",
    assign_to_one: r"assigns to one of the buffers \S*mean and \S*twin, which were one tensor",
    assign_after_a_write: r"assigns another tensor to the buffer \S*mean, which the script has a "
    r"second time and which steps write to in place",
}


def refused():
    smp.init({"microbatches": MICROBATCHES})
    step = smp.step(train_step)
    for function, text in WRONG.items():
        with pytest.raises(CaptureError, match=text):
            step(smp.DistributedModel(Parts(function)), torch.ones(2, 4))


def test_what_shares_memory_otherwise_is_refused():
    run_ranks(refused, 1, env={"MPXLA_DEVICE": "pjrt"})
