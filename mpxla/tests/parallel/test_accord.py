"""Replicas that do different things in a step are named, where their shapes would hide it."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import MpxlaError, RankMismatch
from mpxla.parallel.accord import Accord
from mpxla.tests.comm.threads import threads_world
from mpxla.tests.ranks.run import run_ranks


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flows", "settings", "found"),
    [
        ("aaa", "xxx", ["", "", ""]),
        ("aab", "xxx", ["other parameters", "", "other parameters"]),
        ("aaa", "xyx", ["", "other settings", "other settings"]),
        ("abb", "xyx", ["other parameters", "other parameters", "other settings"]),
    ],
)
def test_each_is_compared_with_the_one_before(flows, settings, found):
    accords = [Accord(transport, (0, 1, 2)) for transport in threads_world(3)]
    for accord, flow, own in zip(accords, flows, settings, strict=True):
        accord.announce(flow, own)
    for rank, (accord, expected) in enumerate(zip(accords, found, strict=True)):
        if expected:
            with pytest.raises(RankMismatch, match=rf"rank {rank} .*{expected}.* rank"):
                accord.check(lambda handle: handle.result())
        accord.check(lambda handle: handle.result())  # once is enough


class Fork(nn.Module):
    """Two layers of one shape, of which a step uses one."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, side):
        return getattr(self, side)(x)


@smp.step
def train_a_side(model, x, side):
    loss = model(x, side).square().sum()
    model.backward(loss)
    return loss


def part_ways(how):
    """The second step is not the same on both replicas."""
    smp.init({"ddp": True, "shard_optimizer_state": how == "rate"})
    other = smp.rank() == 1
    model = smp.DistributedModel(Fork(), bucket_cap_mb=1 if how == "options" and other else 25)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_a_side(model, torch.ones(2, 8), "left")
    optimizer.step()
    if how == "rate" and other:
        optimizer.param_groups[0]["lr"] = 0.2
    if how == "plain":
        x = torch.ones(2, 8).to(model.module.left.weight.device)
        model(x, "right" if other else "left").sum().backward()
    else:
        train_a_side(model, torch.ones(2, 8), "right" if how == "layers" and other else "left")


def error_of(function, *args):
    try:
        function(*args)
    except MpxlaError as error:
        return str(error)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("layers", "trains other parameters in this step than rank"),
        ("plain", "trains other parameters in this step than rank"),
        ("options", "was given other options of smp.DistributedModel"),
        ("rate", "parameters would differ after the update. On rank"),
    ],
)
def test_replicas_that_do_different_things(how, text):
    """Equal shapes: without the comparison, gradients of two layers would be added up."""
    results = run_ranks(error_of, 2, part_ways, how)
    assert all(text in result for result in results), "its own, or the news of the other's"
