"""Without tuning keys a job runs a plan chosen by simulation, the same one on all ranks."""

import logging

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.parity import Plain
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

WIDTH, ROWS, NUM_STEPS = 512, 256, 2
ALL_SET = {
    "pipeline": "interleaved",
    "virtual_pipeline_degree": 1,
    "memory_weight": 0.8,
    "active_microbatches": 2,
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def batch(rows=ROWS, number=0):
    torch.manual_seed(1 + number)
    return torch.randn(rows, WIDTH)


def train(keys, rows=ROWS, small_memory_of=None):
    """Losses, the chosen keys, the schedule that ran and the lines that tell of a choice.

    The replica `small_memory_of` believes that it has no memory, so that it would choose otherwise.
    """
    from mpxla.runtime.plans import cutting
    from mpxla.session import current

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mpxla").addHandler(handler)
    saved = cutting.device_bytes
    smp.init({"microbatches": 4, **keys})
    if smp.dp_rank() == small_memory_of:
        cutting.device_bytes = lambda counters, ranks: 1
    try:
        model = smp.DistributedModel(build())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @smp.step
        def step(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        losses = []
        for number in range(NUM_STEPS):
            optimizer.zero_grad()
            losses.append(step(model, batch(rows, number)).reduce_mean().item())
            optimizer.step()
    finally:
        cutting.device_bytes = saved
        logging.getLogger("mpxla").removeHandler(handler)
    (plan,) = model._engine.calls.plans
    cut, schedule = plan.runner.plan.cut, plan.runner.plan.schedule
    found = (model._engine._cutter.chosen, cut.placement, str(schedule))
    assert current().config.source("pipeline") == ("init" if "pipeline" in keys else "default")
    return losses, found, [line for line in lines if line.startswith("chosen, as nobody")]


def plain_losses(rows=ROWS):
    model = Plain(build(), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        parts = [model(part).square().mean() for part in batch(rows, number).chunk(4)]
        loss = torch.stack(parts).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def test_open_keys_are_chosen_alike_on_all_ranks():
    ranks = run_ranks(train, 2, {"pipeline_parallel_degree": 2})
    assert ranks[0][1] == ranks[1][1]
    assert set(ranks[0][1][0]) >= {"pipeline", "virtual_pipeline_degree", "memory_weight"}
    assert [len(lines) for *_, lines in ranks] == [1, 0], "rank 0 says it once"
    for losses, *_ in ranks:
        assert losses == pytest.approx(plain_losses(), rel=1e-5)


def test_set_keys_are_obeyed_without_a_word():
    ranks = run_ranks(train, 2, {"pipeline_parallel_degree": 2, **ALL_SET})
    assert [(found[0], lines) for _, found, lines in ranks] == [({}, [])] * 2
    assert ranks[0][1][1] == (0, 1)


def test_short_steps_keep_the_defaults():
    ranks = run_ranks(train, 2, {"pipeline_parallel_degree": 2}, 4)
    assert [found[0] for _, found, _ in ranks] == [{}, {}]


@pytest.mark.slow
def test_replicas_follow_the_first():
    keys = {"pipeline_parallel_degree": 2, "ddp": True}
    ranks = run_ranks(train, 4, keys, ROWS, 1)
    assert ranks[0][1][0], "something was chosen"
    assert [found for _, found, _ in ranks] == [ranks[0][1]] * 4
