"""After `smp.init`, torch's collectives take tensors of the device; inside a step they are refused.

Every function above a test runs on every rank and returns what it saw.
"""

import re

import pytest
import torch.distributed as dist
from torch.distributed import all_reduce as all_reduce_by_name

from mpxla.tests.backends import on_device
from mpxla.tests.clients import data, raw_model, refused_in_a_step, start
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def collectives_of_torch():
    smp = start(pipeline_parallel_degree=1, ddp=True)
    rank, seen = smp.rank(), {}
    value = on_device(1 + rank)
    dist.all_reduce(value)
    all_reduce_by_name(value)
    seen["all_reduce"] = value.item()
    dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True).wait()
    seen["max"] = value.item()
    parts = [on_device(0) for _ in range(2)]
    dist.all_gather(parts, on_device(rank))
    seen["all_gather"] = [p.item() for p in parts]
    whole = on_device(0, 0)
    dist.all_gather_into_tensor(whole, on_device(5 + rank))
    seen["all_gather_into_tensor"] = whole.tolist()
    own = on_device(0)
    dist.reduce_scatter_tensor(own, on_device(1 + rank, 3))
    seen["reduce_scatter_tensor"] = own.item()
    sent = on_device(7 if rank == 0 else 0)
    dist.broadcast(sent, src=0)
    seen["broadcast"] = sent.item()
    received = on_device(0)
    pending = dist.irecv(received, 1 - rank)
    dist.isend(on_device(10 + rank), 1 - rank).wait()
    pending.wait()
    seen["irecv"] = received.item()
    exchanged = on_device(0, 0)
    dist.all_to_all_single(exchanged, on_device(2 * rank, 2 * rank + 1))
    seen["all_to_all_single"] = exchanged.tolist()
    rows = [on_device(0) for _ in range(2)] if rank == 0 else None
    dist.gather(on_device(rank + 3), rows, dst=0)
    seen["gather"] = [r.item() for r in rows] if rows else []
    functional = dist._functional_collectives.all_reduce(on_device(1 + rank), "sum", [0, 1])
    seen["functional"] = functional.item()
    return seen


def test_collectives_of_torch_take_device_tensors():
    for rank, seen in enumerate(run_ranks(collectives_of_torch, 2)):
        assert seen == {
            "all_reduce": 6.0,
            "max": 6.0,
            "all_gather": [0.0, 1.0],
            "all_gather_into_tensor": [5.0, 6.0],
            "reduce_scatter_tensor": [3.0, 6.0][rank],
            "broadcast": 7.0,
            "irecv": [11.0, 10.0][rank],
            "all_to_all_single": [[0.0, 2.0], [1.0, 3.0]][rank],
            "gather": [3.0, 4.0] if rank == 0 else [],
            "functional": 3.0,
        }


def collective_in_a_step():
    def reduce(loss):
        dist.all_reduce(loss)
        return loss

    return refused_in_a_step(reduce)


def test_a_collective_inside_a_step_is_refused():
    text = r"all_reduce is a collective inside a step function at .*test_torch_collectives.py:\d+: "
    for found in run_ranks(collective_in_a_step, 2):
        assert re.search(f"{text}dist.", found)


def collective_of_one_rank():
    smp = start(pipeline_parallel_degree=1)
    model = smp.DistributedModel(raw_model())

    @smp.step
    def step(model, x):
        total = model(x).detach().sum()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    found = sum(total.item() for total in step(model, data()[0]).outputs)
    return dist.is_initialized(), found, raw_model()(data()[0]).sum().item()


@pytest.mark.slow
def test_a_collective_of_one_rank_changes_nothing():
    ((is_initialized, found, expected),) = run_ranks(collective_of_one_rank, 1)
    assert is_initialized and found == pytest.approx(expected, rel=1e-5)
