"""What SMP scripts rely on: init, process groups, hooks, the module inside.

The numbers are those of the list of client behaviours. Every function above a test is a small
training script as those programs write it; it runs on every rank and returns what it saw.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpxla.tests.backends import backend_here
from mpxla.tests.clients import (
    REPLICAS,
    close,
    data,
    gradients,
    logged,
    plain_training,
    raw_model,
    start,
    train_step,
)
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


# 13


def initialize_twice():
    import mpxla as smp

    assert not smp.is_initialized()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(raw_model())
    with logged() as lines:
        smp.init({"pipeline_parallel_degree": 1, "microbatches": 8})
    loss = smp.step(train_step)(model, *data()).reduce_mean().item()
    return lines, smp.pp_size(), smp.num_microbatches(), smp.state.cfg.microbatches, loss


def test_13_second_init_warns_and_changes_nothing():
    text = "WARNING: smp.init() was called again; the second call changes nothing."
    (expected,), _ = plain_training(1)
    for lines, *values, loss in run_ranks(initialize_twice, 2):
        assert lines == [text]
        assert values == [2, 2, 2]
        close(loss, expected)


# 14


def use_torch_distributed():
    smp = start(ddp=True)
    dist.barrier()
    total = torch.tensor([1.0 + smp.rank()])
    dist.all_reduce(total)
    sampler = torch.utils.data.DistributedSampler(range(4), shuffle=False)
    same = torch.tensor(float(smp.rank()))
    dist.all_reduce(same, group=smp.get_mp_process_group())
    alone = torch.tensor(float(smp.rank()))
    dist.all_reduce(alone, group=smp.get_dp_process_group())
    return dist.get_rank(), dist.get_world_size(), total.item(), list(sampler), same.item(), alone


def test_14_init_creates_the_default_process_group():
    assert run_ranks(use_torch_distributed, 2) == [
        (0, 2, 3.0, [0, 2], 1.0, torch.tensor(0.0)),
        (1, 2, 3.0, [1, 3], 1.0, torch.tensor(1.0)),
    ]


# 16


def run_hooks():
    smp = start()
    raw = raw_model()
    model = smp.DistributedModel(raw)
    events: list[Any] = []
    optimizer = None

    def partitioned(model, given):
        names = [name for name, _ in model.local_named_parameters()]
        events.append(
            ("partition", given is optimizer, model.partitioned, names, raw.first.weight.grad)
        )

    model.register_post_partition_hook(partitioned)
    handle = model.register_post_partition_hook(lambda model, optimizer: events.append("never"))
    handle.remove()
    model.register_post_step_hook(
        lambda model, given: events.append(("step", given is optimizer, bool(gradients(model))))
    )
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(raw.parameters(), lr=0.1))
    assert not model.partitioned
    step = smp.step(train_step)
    step(model, *data())
    step(model, *data())
    return events


def test_16_hooks_run_after_partitioning_and_after_steps():
    for rank, events in enumerate(run_ranks(run_hooks, 2)):
        part = ("first", "second")[rank]
        names = [f"{part}.weight", f"{part}.bias"]
        assert events == [
            ("partition", True, True, names, None),
            ("step", True, True),
            ("step", True, True),
        ]


# 17


def reach_the_module():
    smp = start()
    raw = raw_model()
    model = smp.DistributedModel(raw)
    smp.step(train_step)(model, *data())
    return model.get_module() is raw, model.module is raw, type(model.module).__name__


def test_17_the_users_module_can_be_reached():
    assert run_ranks(reach_the_module, 2) == [(True, True, "Net")] * 2


# 21


def gather_over_replicas():
    smp = start(**REPLICAS)
    numbers = smp.allgather(1.5 + smp.rank(), smp.DP_GROUP)
    tensors = smp.allgather(torch.full((2,), smp.rank()), smp.CommGroup.DP_GROUP)
    on_device = smp.allgather(torch.ones(1).to(backend_here().device) * smp.rank(), smp.DP_GROUP)
    return numbers, [t.tolist() for t in tensors], [t.cpu().tolist() for t in on_device]


def test_21_allgather_of_numbers_and_tensors():
    expected = ([1.5, 2.5], [[0, 0], [1, 1]], [[0.0], [1.0]])
    assert run_ranks(gather_over_replicas, 2) == [expected] * 2
