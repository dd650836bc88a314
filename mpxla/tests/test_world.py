"""After `smp.init`, torch_xla's collectives and ranks are those of the job.

Every function above a test runs on every rank and returns what it saw.
"""

import io

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.core.xla_model import all_reduce as xm_all_reduce_by_name

from mpxla.tests.backends import on_device
from mpxla.tests.clients import refused_in_a_step, start
from mpxla.tests.ranks.run import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.torch_xla]

GROUPS = [[0, 2], [1, 3]]


def names_of_torch_xla():
    before = xr.world_size(), xr.global_ordinal()
    smp = start(pipeline_parallel_degree=1, ddp=True)
    rank = smp.rank()
    printed = io.StringIO()
    xm.master_print("once", fd=printed)
    seen = {
        "world": (xr.world_size(), xr.global_ordinal(), xr.local_ordinal()),
        "processes": (xr.process_count(), xr.process_index(), xr.global_device_count()),
        "master": (xm.is_master_ordinal(), xm.is_master_ordinal(local=False)),
        "printed": printed.getvalue(),
        "sum": xm.all_reduce(xm.REDUCE_SUM, on_device(1 + rank)).item(),
        "by name": xm_all_reduce_by_name("sum", on_device(1 + rank)).item(),
        "scaled": xm_all_reduce_by_name("sum", on_device(1 + rank), scale=0.5).item(),
        "max": xm.all_reduce(xm.REDUCE_MAX, on_device(1 + rank), groups=[[0, 1]]).item(),
        "gather": xm.all_gather(on_device(rank, 5)).tolist(),
        "scatter": xm.reduce_scatter("sum", on_device(1 + rank, 3), 1.0, 0, 2).tolist(),
        "to all": xm.all_to_all(on_device(2 * rank, 2 * rank + 1), 0, 0, 2).tolist(),
        "permute": xm.collective_permute(on_device(rank), [[0, 1], [1, 0]]).item(),
        "mesh": xm.mesh_reduce("loss", 1.0 + rank, sum),
        "met": xm.rendezvous("there", str(rank).encode()),
    }
    values = [on_device(1 + rank), on_device(10 + rank)]
    xm.all_reduce("sum", values, scale=0.5)
    seen["in place"] = [v.item() for v in values]
    values = [on_device(5 + rank)]
    xm.collective_broadcast(values)
    seen["broadcast"] = values[0].item()
    smp.shutdown()
    after = xr.world_size(), xr.global_ordinal()
    seen["alone again"] = xm.all_reduce("sum", on_device(1 + rank)).item()
    return seen, before == after


def test_names_of_torch_xla_speak_of_the_job_until_shutdown():
    for rank, (seen, is_restored) in enumerate(run_ranks(names_of_torch_xla, 2)):
        assert is_restored
        assert seen == {
            "world": (2, rank, rank),
            "processes": (2, rank, 2),
            "master": (rank == 0, rank == 0),
            "printed": "once\n" if rank == 0 else "",
            "sum": 3.0,
            "by name": 3.0,
            "scaled": 1.5,
            "max": 2.0,
            "gather": [0.0, 5.0, 1.0, 5.0],
            "scatter": [3.0] if rank == 0 else [6.0],
            "to all": [0.0, 2.0] if rank == 0 else [1.0, 3.0],
            "permute": 1.0 - rank,
            "mesh": 3.0,
            "met": [b"0", b"1"],
            "in place": [1.5, 10.5],
            "broadcast": 5.0,
            "alone again": 1.0 + rank,
        }


def train(use_smp):
    """Two replicas by torch_xla's own loop, or by mpxla's model with torch_xla's optimizer step."""
    smp = start(pipeline_parallel_degree=1, ddp=True)
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    data = torch.arange(24.0).reshape(8, 3) / 10
    mine = data[xr.global_ordinal() :: xr.world_size()].to("xla")
    model = smp.DistributedModel(model) if use_smp else model.to(torch_xla.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if use_smp:
        optimizer = smp.DistributedOptimizer(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(mine).square().mean().backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
    return [p.detach().cpu() for p in model.parameters()]


def plain():
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    data = torch.arange(24.0).reshape(8, 3) / 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("use_smp", [False, True])
def test_a_loop_of_torch_xla_trains_on_its_share_and_averages_gradients_once(use_smp):
    for parameters in run_ranks(train, 2, use_smp):
        torch.testing.assert_close(parameters, plain())


def groups_of_four():
    smp = start(pipeline_parallel_degree=1, ddp=True)
    value = on_device(10 ** smp.rank())
    return (
        xm.all_reduce("sum", value, groups=GROUPS).item(),
        xm.all_gather(value, groups=GROUPS, pin_layout=False).tolist(),
        xm.reduce_scatter("sum", torch.cat([value, value * 2]), 1.0, 0, 2, groups=GROUPS).tolist(),
    )


def test_groups_of_torch_xla():
    even, odd = (101.0, [1.0, 100.0]), (1010.0, [10.0, 1000.0])
    assert run_ranks(groups_of_four, 4) == [
        (*even, [101.0]),
        (*odd, [1010.0]),
        (*even, [202.0]),
        (*odd, [2020.0]),
    ]


def collective_in_a_step():
    return refused_in_a_step(lambda loss: xm.all_reduce("sum", loss))


def test_a_collective_inside_a_step_is_refused():
    for found in run_ranks(collective_in_a_step, 2):
        assert "_c10d_functional.all_reduce in the step function at " in found
        assert "test_world.py:" in found and " is a collective inside a step" in found
