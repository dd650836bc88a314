"""Layers and objects that a model makes when it runs first, in a step."""

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
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4.0) / 4)
        self.factor, self.options = 1.0, {}

    def forward(self, x):
        return (x - self.table.to(x.device)) * self.factor * self.options.get("more", 1)


class Criterion:
    """Is no module."""

    def __init__(self, net):
        self.net, self.factor, self.num_calls = net, 1.0, 0
        self.table = torch.arange(4.0) / 4

    def __call__(self, x):
        self.num_calls += 1
        scale = self.factor * self.num_calls
        return (x - self.table.to(x.device)) * scale + self.net.first.bias


def layer(net, x):
    if net.made is None:
        net.made = nn.Linear(4, 4)
    return net.made(x)


def layer_set_up(net, x):
    if net.made is None:
        net.made = nn.Linear(4, 4, bias=False)
        nn.init.eye_(net.made.weight)
        net.made.weight.data.mul_(2)
    return net.made(x)


def by_a_flag(net, x):
    if not net.is_built:
        net.made, net.factor = Scaled(), 3.0
        net.made.factor, net.made.options["more"] = 0.5, 2
        net.made.table.add_(1)
        net.is_built = True
    return net.made(x) * net.factor


def no_module(net, x):
    if net.made is None:
        net.made = Criterion(net)
        net.made.factor = 0.5
        net.made.table.mul_(2)
    return net.made(x)


def in_a_table(net, x):
    if "a" not in net.layers:
        net.layers["a"] = nn.Linear(4, 4)
    return net.layers["a"](x)


def tied(net, x):
    if net.made is None:
        net.made = nn.Linear(4, 4)
        net.made.weight = net.first.weight
    return net.made(x)


def parameter(net, x):
    if net.made is None:
        net.made = nn.Parameter(torch.full((4,), 0.5))
    return x * net.made


def after_a_norm_and_a_count(net, x):
    """What happens in every call before it is made happens once in the first one."""
    net.num_calls += 1
    x = net.norm(x)
    if net.made is None:
        net.made = nn.Linear(4, 4)
    return net.made(x) * net.num_calls


def after_data(net, x):
    """Numbers of the first microbatch stay."""
    if net.made is None:
        net.made, net.mean = Scaled(), x.detach().mean(0)
    return net.made(x) - net.mean


def changed_by_its_use(net, x):
    if net.made is None:
        net.made = Scaled()
        net.made.factor = 2.0
    y = net.made(x)
    net.made.factor *= 0.5
    return y


def given_after_its_use(net, x):
    if net.made is None:
        net.made = Scaled()
    y = net.made(x) * net.num_calls
    if net.num_calls == 0:
        net.num_calls = 5
    return y


FEW = (layer, by_a_flag, no_module, after_a_norm_and_a_count)
ALL = (
    *(*FEW, layer_set_up, in_a_table, tied, parameter, after_data),
    *(changed_by_its_use, given_after_its_use),
)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.made, self.is_built, self.num_calls = function, None, False, 0
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.layers = nn.ModuleDict()

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


def batch(number):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def step_of(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def expected(function):
    net, losses = Net(function), []
    net.backward = lambda loss: (loss / MICROBATCHES).backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1)
    for number in range(3):
        optimizer.zero_grad()
        losses += [step_of(net, part).item() for part in batch(number).chunk(MICROBATCHES)]
        optimizer.step()
    return losses, net.state_dict()


def trained(stages, functions):
    smp.init({"microbatches": MICROBATCHES, "pipeline_parallel_degree": stages})
    step, found = smp.step(step_of), []
    for function in functions:
        model, losses = smp.DistributedModel(Net(function)), []
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(1)
        for number in range(3):
            optimizer.zero_grad()
            losses += [loss.item() for loss in step(model, batch(number)).outputs]
            optimizer.step()
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        found.append((losses, state))
    return found


@on_few_all_and_stages(FEW, ALL)
def test_they_are_what_they_are_in_pytorch(stages, functions, env):
    for results in run_ranks(trained, stages, stages, functions, env=env):
        for function, (losses, state) in zip(functions, results, strict=True):
            expected_losses, expected_state = expected(function)
            message = lambda m, f=function: f"{f.__name__}: {m}"  # noqa: E731
            close(losses, expected_losses, msg=message)
            close(state, dict(expected_state), msg=message)


def every_time(net, x):
    net.made = Scaled()
    return net.made(x)


def where_no_run_comes(net, x):
    """A capture takes every device for its own."""
    x = x.cuda()
    if net.made is None:
        net.made = nn.Linear(4, 4)
    return net.made(x)


def refused():
    smp.init({"microbatches": 1})
    text = r"makes a Scaled for \S*made in every call at .*test_made_in_steps.py"
    with pytest.raises(CaptureError, match=text):
        smp.step(step_of)(smp.DistributedModel(Net(every_time)), batch(0))
    text = (
        r"makes a Linear for \S*made at .*runs once in plain PyTorch, where it does not come "
        r"so far \(\w+: .*(CUDA|NVIDIA).*\)\. Make it in __init__"
    )
    with pytest.raises(CaptureError, match=text):
        smp.step(step_of)(smp.DistributedModel(Net(where_no_run_comes)), batch(0))


def test_what_no_run_makes_is_refused():
    run_ranks(refused, 1, env={"MPXLA_DEVICE": "pjrt"})
