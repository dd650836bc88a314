"""Param groups that scripts change between steps: updated and saved as in plain torch."""

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import host, logged
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

STAGES = {"pipeline_parallel_degree": 2}
DIVIDED = {"ddp": True, "shard_optimizer_state": True}


def filled(layer):
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.1)
    return layer


def take_out(net, optimizer):
    group, gone = optimizer.param_groups[0], net[2].weight
    group["params"] = [p for p in group["params"] if p is not gone]
    optimizer.state.pop(gone, None)


def take_group(net, optimizer):
    for parameter in optimizer.param_groups.pop(0)["params"]:
        optimizer.state.pop(parameter, None)


def begin_anew(net, optimizer):
    optimizer.param_groups = []
    optimizer.state = defaultdict(dict)
    optimizer.add_param_group({"params": list(net.parameters()), "lr": 0.01})


def put_in(net, optimizer):
    net.append(filled(nn.Linear(4, 4).double()))
    optimizer.param_groups[0]["params"] += net[-1].parameters()


def exchange(net, optimizer):
    """Another last layer, in the group of the old one."""
    gone, net[4] = list(net[4].parameters()), filled(nn.Linear(8, 4).double())
    group = optimizer.param_groups[1]
    group["params"] = [p for p in group["params"] if all(p is not one for one in gone)]
    for parameter in gone:
        optimizer.state.pop(parameter, None)
    group["params"].extend(net[4].parameters())


def move(net, optimizer):
    one, other = (group["params"] for group in optimizer.param_groups)
    bias = net[0].bias
    one[:] = [p for p in one if p is not bias]
    other.append(bias)


CHANGES = (take_out, take_group, begin_anew, put_in, exchange, move)


def trained(change, is_plain):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()
    model = net if is_plain else smp.DistributedModel(net)
    first, last = list(net.parameters())[:4], list(net.parameters())[4:]
    groups = [{"params": first}, {"params": last, "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    optimizer = optimizer if is_plain else smp.DistributedOptimizer(optimizer)

    def step(model, x):
        loss = model(x).square().mean()
        loss.backward() if is_plain else model.backward(loss)
        return loss

    step = step if is_plain else smp.step(step)
    for number in range(4):
        optimizer.zero_grad()
        step(model, torch.linspace(-1, number, 16, dtype=torch.float64).view(4, 4))
        optimizer.step()
        if number == 1:
            change(net, optimizer)
        if number == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
    state = optimizer.state_dict()
    held = [group["params"] for group in state["param_groups"]]
    momenta = {at: entry["momentum_buffer"] for at, entry in state["state"].items()}
    return host(model.state_dict().items()), held, host(momenta.items())


def all_trained(config, changes):
    smp.init({"microbatches": 1, **config})
    return [trained(change, is_plain=False) for change in changes]


@pytest.mark.parametrize(
    ("config", "num_ranks", "changes"),
    [
        (STAGES, 2, (take_out, put_in, exchange)),
        pytest.param(STAGES, 2, (take_group, begin_anew, move), marks=pytest.mark.slow),
        pytest.param({}, 1, CHANGES, marks=pytest.mark.slow),
        pytest.param(DIVIDED, 2, (take_group, begin_anew, put_in), marks=pytest.mark.slow),
    ],
    ids=["stages", "stages-others", "one", "divided"],
)
def test_groups_that_change_are_those_of_plain_torch(config, num_ranks, changes):
    wanted = [trained(change, is_plain=True) for change in changes]
    for found in run_ranks(all_trained, num_ranks, config, changes):
        for change, (values, held, momenta), expected in zip(changes, found, wanted, strict=True):
            assert held == expected[1], change
            torch.testing.assert_close(values, expected[0], msg=change.__name__)
            torch.testing.assert_close(momenta, expected[2], msg=change.__name__)


def take_all_out():
    """By comparison with the model's parameters, which parts are none of."""
    smp.init(DIVIDED)

    def change(net, optimizer):
        own = set(net.parameters())
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p in own]
        optimizer.state.clear()

    with logged() as lines:
        trained(change, is_plain=False)
    return [line for line in lines if "were taken out of a group" in line]


@pytest.mark.slow
def test_taking_parts_out_is_told():
    for (line,) in run_ranks(take_all_out, 2):
        assert "none of model.parameters()" in line
