"""Replicas that do different things in a step are named, where their shapes would hide it."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.comm.objects import Objects
from mpxla.errors import MpxlaError, RankMismatch
from mpxla.parallel.gradients.rounds import Rounds
from mpxla.tests.comm.threads import threads_world
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.tolerances import assert_close_by_norm


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flows", "settings", "found"),
    [
        ("aaa", "xxx", [True, True, True]),
        ("aab", "xxx", [False, False, False]),
        ("aaa", "xyx", ["rank 1", "rank 0", "rank 1"]),
        ("abb", "yyx", ["rank 2", "rank 2", "rank 0"]),
    ],
)
def test_each_is_compared_with_all_others(flows, settings, found):
    everyone = [Rounds(world, Objects(world), (0, 1, 2)) for world in threads_world(3)]
    for rounds, flow, own in zip(everyone, flows, settings, strict=True):
        rounds.begin_step(flow, own, "", list)
    for rank, (rounds, expected) in enumerate(zip(everyone, found, strict=True)):
        if isinstance(expected, str):
            text = rf"^rank {rank} has other settings of its optimizer than {expected},"
            with pytest.raises(RankMismatch, match=text):
                rounds.is_same()
        else:
            for _ in range(2):  # once is enough
                assert rounds.is_same() is expected


@pytest.mark.unit
@pytest.mark.parametrize(("drifted", "is_alike"), [("aa", True), ("ab", False), ("a ", False)])
def test_replicas_tell_what_evaluations_have_written(drifted, is_alike):
    everyone = [Rounds(world, Objects(world), (0, 1)) for world in threads_world(2)]
    for rounds, own in zip(everyone, drifted, strict=True):
        rounds.begin_step("flow", "settings", "", list, own)
    for rounds in everyone:
        assert rounds.have_drifted_alike() is is_alike
        assert rounds.is_same()  # what they reduce


class Fork(nn.Module):
    """Two layers of one shape, of which a step uses one."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.SyncBatchNorm(8)

    def forward(self, x, side):
        if side == "norm":  # with the statistics of all replicas
            return self.norm(self.left(x))
        return getattr(self, side)(x)


@smp.step
def train_a_side(model, x, side):
    loss = model(x, side).square().sum()
    model.backward(loss)
    return loss


SIDES = [("left", "left", "left"), ("right", "left", "left"), ("left", "right", "right")]
"""Of each replica, step after step."""


def batch(step, replica):
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + replica))


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def fork():
    torch.manual_seed(0)
    return Fork()


def train_apart(keys, is_plain):
    smp.init({"ddp": True, **keys})
    # With a bucket for each parameter, some are of other replicas only.
    model = smp.DistributedModel(fork(), bucket_cap_mb=1e-4 if "reduction_dtype" in keys else 25)
    optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
    has_gradient = []
    for number, sides in enumerate(SIDES):
        optimizer.zero_grad()
        x, side = batch(number, smp.rank()), sides[smp.rank()]
        if is_plain:
            x = x.to(model.module.left.weight.device)
            model(x, side).square().sum().backward()
        else:
            train_a_side(model, x, side)
        has_gradient.append([p.grad is not None for p in model.parameters()])
        optimizer.step()
    return has_gradient, {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("keys", "is_plain"),
    [
        pytest.param({}, False, marks=pytest.mark.slow),
        ({}, True),
        ({"shard_optimizer_state": True}, False),
        pytest.param({"reduction_dtype": "bfloat16"}, False, marks=pytest.mark.slow),
        pytest.param(
            {"reduction_dtype": "bfloat16", "shard_optimizer_state": True},
            False,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_replicas_that_train_different_layers(keys, is_plain):
    """What only one of three trains counts for all; what none trains is left alone."""
    model = fork()
    optimizer = optimizer_of(model.parameters())
    for number, sides in enumerate(SIDES):
        optimizer.zero_grad()
        for replica, side in enumerate(sides):
            (model(batch(number, replica), side).square().sum() / len(sides)).backward()
        optimizer.step()
    for has_gradient, state in run_ranks(train_apart, 3, keys, is_plain):
        if not keys:
            left, both = [True] * 2 + [False] * 4, [True] * 4 + [False] * 2
            assert has_gradient == [left, both, both]
        is_narrow = "reduction_dtype" in keys
        assert_close_by_norm(state, model.state_dict(), 1e-2 if is_narrow else 1e-5)


def part_ways(how):
    """The second step is not the same on both replicas."""
    keys = {"shard_gradients": how in ("layers", "plain"), "shard_optimizer_state": how == "rate"}
    smp.init({"ddp": True, "sdp_param_persistence_threshold": 1, **keys})
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
        side = {"layers": "right", "norm": "norm"}.get(how, "left")
        train_a_side(model, torch.ones(2, 8), side if other else "left")


def error_of(function, *args):
    try:
        function(*args)
    except MpxlaError as error:
        return str(error)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "text"),
    [
        pytest.param(
            *("layers", "gather or scatter other parameters in this call than rank 0"),
            marks=pytest.mark.slow,
        ),
        ("plain", "trains other parameters in this step than another"),
        pytest.param(
            *("norm", "exchanges other values with its replicas inside of this step"),
            marks=pytest.mark.slow,
        ),
        ("options", "was given other options of smp.DistributedModel"),
        ("rate", "parameters would differ after the update. On rank"),
    ],
)
def test_replicas_that_do_different_things(how, text):
    """Equal shapes: without the comparison, gradients of two layers would be added up."""
    results = run_ranks(error_of, 2, part_ways, how)
    assert all(text in result for result in results), "its own, or the news of the other's"
