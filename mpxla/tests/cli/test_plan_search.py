"""The search of `plan`: cuts, schedules and recomputation under a limit of memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mpxla.cli import plan_search
from mpxla.cli.factory import capture_factory
from mpxla.cli.plan_search import PlanSearch, describe_rows, schedules_to_try
from mpxla.config import Config
from mpxla.errors import ScheduleError
from mpxla.graph.cost import MachineModel
from mpxla.runtime.plans.cut import cut_step
from mpxla.runtime.plans.forecast import forecast
from mpxla.tests.device.null import plain_lowering

pytestmark = pytest.mark.unit

CONFIG = Config(pipeline_parallel_degree=2, microbatches=4)
MACHINE = MachineModel()


def train(model, x):
    loss = model(x).square().sum()
    model.backward(loss)
    return loss


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    layers = [
        layer for _ in range(6) for layer in (nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16))
    ]
    return capture_factory(nn.Sequential(*layers), (torch.randn(64, 16),), train)


def plans(step, limit, config=CONFIG, has_weight=False):
    tried = schedules_to_try(config, "interleaved", 1, None)
    return PlanSearch(config, step, MACHINE, plain_lowering(), limit).best(tried, has_weight)


def fullest(row):
    return max(row.found.rank_bytes)


@pytest.fixture(scope="module")
def free(step):
    return plans(step, None)


def test_without_a_limit_nothing_is_computed_again(free):
    assert all(row.config.activation_memory == "keep" for row in free)
    assert [row.order for row in free] == sorted(row.order for row in free)


def test_under_a_limit_every_row_fits_and_says_what_it_keeps(step, free):
    limit = int(0.8 * min(map(fullest, free)))
    rows = plans(step, limit)
    assert all(fullest(row) <= limit for row in rows)
    assert [row.order for row in rows] == sorted(row.order for row in rows)
    best = rows[0]
    assert isinstance(best.config.activation_memory, int)
    assert best.found.timeline.makespan > free[0].found.timeline.makespan
    # A budget is cheaper than to compute everything again.
    everything = replace(best.config, activation_memory="recompute", set_by={})
    cut = cut_step(step, everything, plain_lowering(), {}, None)
    slowest = forecast(cut, everything, MACHINE, plain_lowering())
    assert best.found.timeline.makespan < slowest.timeline.makespan
    lines = describe_rows(rows, 5).splitlines()
    assert len(lines) == 2 + len(rows)
    assert "fullest rank  activations" in lines[1] and "kept  memory_weight" in lines[1]
    assert "KiB" in lines[2] and "interleaved, 1 per rank" in lines[2]


@pytest.mark.slow
def test_what_is_given_stays(step, free):
    found = schedules_to_try(CONFIG, "zero_bubble", 2, 3)
    assert [str(one) for one in found] == [
        "zero_bubble, 2 per rank, 4 microbatches, 3 active",
    ]
    assert {one.pipeline for one in schedules_to_try(CONFIG, None, None, None)} > {"simple"}
    limit = int(0.8 * min(map(fullest, free)))
    weighed = plans(step, limit, replace(CONFIG, memory_weight=0.5, set_by={}), has_weight=True)
    assert {row.config.memory_weight for row in weighed} == {0.5}
    kept = replace(CONFIG, activation_memory="recompute", set_by={})
    assert {row.config.activation_memory for row in plans(step, None, kept)} == {"recompute"}


def test_nothing_fits_whatever_the_cut_weighs(step, monkeypatch):
    weights = set()

    def noting(step, config, *arguments, **keywords):
        weights.add(config.memory_weight)
        return cut_step(step, config, *arguments, **keywords)

    monkeypatch.setattr(plan_search, "cut_step", noting)
    with pytest.raises(ScheduleError, match=r"No schedule fits into 100 bytes per rank: the least"):
        plans(step, 100)
    assert weights == {0.2, 0.8}
