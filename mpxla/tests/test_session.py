"""Start and end of a session: order of calls, what `init` makes, what `shutdown` leaves."""

import json
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpxla as smp
from mpxla.env import xla_threads
from mpxla.errors import MpxlaError
from mpxla.tests.ranks.run import run_ranks

NEED_A_SESSION = (
    *(f"{axis}_{what}" for axis in ("pp", "tp", "dp", "rdp", "mp") for what in ("rank", "size")),
    *("rank", "size", "local_rank", "local_size", "num_microbatches"),
    *(f"get_{axis}_group" for axis in ("mp", "dp", "tp", "pp", "rdp")),
    *(f"get_{axis}_process_group" for axis in ("world", "mp", "dp", "tp", "pp", "rdp")),
    *("barrier", "dp_barrier", "mp_barrier", "shutdown"),
)


@pytest.mark.unit
@pytest.mark.parametrize("name", NEED_A_SESSION)
def test_calls_before_init(name):
    with pytest.raises(MpxlaError, match=r"smp\.init\(\) has not been called; call it first"):
        getattr(smp, name)()


@pytest.mark.unit
def test_other_uses_before_init():
    uses = [
        lambda: smp.state.cfg,
        lambda: smp.broadcast(1, smp.WORLD),
        lambda: smp.send(1, 0),
        lambda: smp.recv_from(0),
        lambda: smp.allgather(1, smp.WORLD),
        lambda: smp.DistributedModel(nn.Linear(1, 1)),
        lambda: smp.DistributedOptimizer(torch.optim.SGD([torch.zeros(1)], lr=1)),
        lambda: smp.step(lambda x: x)(torch.zeros(1)),
    ]
    for use in uses:
        with pytest.raises(MpxlaError, match=r"smp\.init\(\) has not been called"):
            use()
    assert not smp.is_initialized()
    assert not smp.is_tracing()


def init_and_shut_down():
    hook = sys.excepthook
    seen = []
    for degree in (2, 1):
        assert not smp.is_initialized()
        smp.init({"pipeline_parallel_degree": degree, "ddp": True})
        seen.append((smp.is_initialized(), smp.pp_size(), dist.is_initialized()))
        assert sys.excepthook is not hook
        smp.barrier()
        smp.shutdown()
        seen.append((smp.is_initialized(), dist.is_initialized()))
        assert sys.excepthook is hook, "nothing of a session is left"
    return seen


@pytest.mark.ranks
def test_a_session_can_follow_another_one():
    expected = [(True, 2, True), (False, False), (True, 1, True), (False, False)]
    assert run_ranks(init_and_shut_down, 2) == [expected] * 2


def keep_group_of_script(path):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    smp.init({"pipeline_parallel_degree": 2})
    gathered = smp.allgather(rank, smp.WORLD)
    smp.shutdown()
    return gathered, dist.is_initialized()


@pytest.mark.ranks
def test_a_process_group_of_the_script_is_used_and_kept(tmp_path):
    results = run_ranks(keep_group_of_script, 2, str(tmp_path / "store"))
    assert results == [([0, 1], True)] * 2


def keep_excepthook_of_script():
    smp.init({"pipeline_parallel_degree": 2})
    before = sys.excepthook
    sys.excepthook = own = lambda *args: before(*args)
    smp.shutdown()
    kept, sys.excepthook = sys.excepthook is own, before
    return kept


@smp.step
def loss_step(model, x):
    loss = model(x).sum()
    model.backward(loss)
    return loss


def use_model_after_shutdown():
    smp.init({"pipeline_parallel_degree": 2})
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(optimizer)
    loss_step(model, torch.ones(2, 4))
    smp.shutdown()
    for use in (model.state_dict, optimizer.state_dict, lambda: loss_step(model, torch.ones(2, 4))):
        with pytest.raises(MpxlaError, match=r"smp\.init\(\) has not been called"):
            use()


@pytest.mark.ranks
def test_models_cannot_be_used_after_shutdown():
    run_ranks(use_model_after_shutdown, 2)


@pytest.mark.ranks
def test_an_excepthook_set_after_init_is_kept():
    assert run_ranks(keep_excepthook_of_script, 2) == [True, True]


def describe():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 3, "ddp": True})
    axes = ("pp", "tp", "dp", "rdp", "mp")
    groups = {axis: getattr(smp, f"get_{axis}_group")() for axis in axes}
    members = {
        axis: dist.get_process_group_ranks(getattr(smp, f"get_{axis}_process_group")())
        for axis in axes
    }
    world = dist.get_process_group_ranks(smp.get_world_process_group())
    return {
        "ranks": [getattr(smp, f"{axis}_rank")() for axis in axes],
        "sizes": [getattr(smp, f"{axis}_size")() for axis in axes],
        "global": [smp.rank(), smp.size(), smp.local_rank(), smp.local_size()],
        "groups": groups,
        "members": members,
        "world": world,
        "microbatches": [smp.num_microbatches(), smp.state.cfg.microbatches],
        "active": smp.state.cfg.active_microbatches,
        "aliases": [smp.PP_GROUP is smp.CommGroup.PP_GROUP, smp.WORLD is smp.CommGroup.WORLD],
    }


@pytest.mark.ranks
def test_getters_in_a_world_of_four():
    for rank, found in enumerate(run_ranks(describe, 4)):
        replica, stage = divmod(rank, 2)
        pipeline, same_stage = [2 * replica, 2 * replica + 1], [stage, stage + 2]
        groups = {"pp": pipeline, "tp": [rank], "dp": same_stage, "rdp": same_stage, "mp": pipeline}
        assert found == {
            "ranks": [stage, 0, replica, replica, stage],
            "sizes": [2, 1, 2, 2, 2],
            "global": [rank, 4, rank, 4],
            "groups": groups,
            "members": groups,
            "world": [0, 1, 2, 3],
            "microbatches": [3, 3],
            "active": 3,
            "aliases": [True, True],
        }


def communicate():
    """Every primitive once, over groups that are not the world."""
    smp.init({"pipeline_parallel_degree": 2, "ddp": True})
    seen = []
    if smp.dp_rank() == 0:
        smp.send((smp.rank(), torch.ones(2)), 1, smp.RankType.DP_RANK)
    else:
        number, ones = smp.recv_from(0, smp.RankType.DP_RANK)
        seen.append((number, ones.tolist()))
    seen.append(smp.allgather(smp.rank(), smp.MP_GROUP))
    if smp.rank() == 3:
        smp.broadcast("from 3", smp.WORLD)
    else:
        seen.append(smp.recv_from(3))
    smp.mp_barrier()
    smp.dp_barrier()
    smp.barrier(smp.PP_GROUP)
    return seen


@pytest.mark.ranks
def count_threads():
    smp.init({"ddp": True})
    return xla_threads()


def test_ranks_of_one_machine_share_its_cores():
    assert max(run_ranks(count_threads, 2)) <= max(1, len(os.sched_getaffinity(0)) // 2)


def test_objects_travel_within_groups():
    assert run_ranks(communicate, 4) == [
        [[0, 1], "from 3"],
        [[0, 1], "from 3"],
        [(0, [1.0, 1.0]), [2, 3], "from 3"],
        [(1, [1.0, 1.0]), [2, 3]],
    ]


def read_launcher_configuration(parameters):
    os.environ["SM_HP_MP_PARAMETERS"] = parameters
    smp.init({"microbatches": 7, "pipeline": "simple"})
    cfg = smp.state.cfg
    return cfg.microbatches, cfg.pipeline, smp.pp_size(), cfg.source("microbatches")


@pytest.mark.ranks
def test_the_launchers_configuration_wins():
    parameters = json.dumps({"partitions": 2, "microbatches": 4, "ddp": False})
    results = run_ranks(read_launcher_configuration, 2, parameters)
    assert results == [(4, "simple", 2, "launcher")] * 2


def alone():
    smp.init()
    smp.barrier()
    gathered = smp.allgather("a", smp.WORLD)
    smp.init({"pipeline_parallel_degree": 9})
    return smp.rank(), smp.size(), gathered, smp.get_dp_group(), dist.get_world_size()


@pytest.mark.ranks
def test_a_world_of_one():
    assert run_ranks(alone, 1) == [(0, 1, ["a"], [0], 1)]
