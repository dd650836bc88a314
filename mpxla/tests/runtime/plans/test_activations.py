"""A limit of bytes for activations: the least possible one is named, and suffices."""

import re

import pytest
import torch
from torch import nn

from mpxla.cli.factory import capture_factory
from mpxla.config import Config
from mpxla.errors import ConfigError
from mpxla.graph.cost import MachineModel
from mpxla.runtime.plans.activations import plan_stages, stage_bytes
from mpxla.runtime.plans.cut import cut_step
from mpxla.runtime.plans.forecast import forecast
from mpxla.runtime.plans.scheduling import schedule_step
from mpxla.schedule.analysis import peak_bytes
from mpxla.tests.device.null import plain_lowering

pytestmark = pytest.mark.unit

KEYS = {"pipeline_parallel_degree": 2, "microbatches": 8, "memory_weight": 0.0}
WAYS = {
    "interleaved": {},
    "zero_bubble": {"pipeline": "zero_bubble"},
    "offloading": {
        "pipeline": "simple",
        "offload_activations": True,
        "activation_loading_horizon": 1,
    },
}


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
    return capture_factory(nn.Sequential(*layers), (torch.randn(6, 16),), train)


def planned(step, rank, limit, way):
    config = Config(**KEYS, **WAYS[way])
    cut = cut_step(step, config, plain_lowering(), {}, None)
    actions = schedule_step(cut, config)[rank]
    own = [stage for stage in cut.stages if cut.placement[stage.index] == rank]
    stages = plan_stages(own, actions, rank, plain_lowering(), limit)
    return peak_bytes([actions], stage_bytes(stages))[0]


@pytest.mark.parametrize(
    ("rank", "way"),
    [
        pytest.param(0, "interleaved", marks=pytest.mark.slow),
        (1, "zero_bubble"),
        pytest.param(0, "offloading", marks=pytest.mark.slow),
        pytest.param(1, "interleaved", marks=pytest.mark.slow),
        pytest.param(0, "zero_bubble", marks=pytest.mark.slow),
        pytest.param(1, "offloading", marks=pytest.mark.slow),
    ],
)
def test_the_least_that_is_possible_is_named_and_suffices(step, rank, way):
    with pytest.raises(ConfigError, match="activation_memory: 1 bytes are too few for") as caught:
        planned(step, rank, 1, way)
    text = str(caught.value)
    assert f"Stage {rank} takes most of them" in text and f"pipeline rank {rank}, which" in text
    (least,) = map(int, re.findall(r"Give activation_memory at least (\d+),", text))
    assert planned(step, rank, least, way) == least
    with pytest.raises(ConfigError, match=f"{least - 1} bytes are too few"):
        planned(step, rank, least - 1, way)


def test_offloading_lets_a_rank_do_with_less(step):
    kept, moved = (
        forecast(
            cut_step(step, config, plain_lowering(), {}, None),
            config,
            MachineModel(),
            plain_lowering(),
        )
        for config in (
            Config(**KEYS, pipeline="simple"),
            Config(**KEYS, **WAYS["offloading"]),
        )
    )
    assert all(
        now < 0.5 * before
        for now, before in zip(moved.activation_bytes, kept.activation_bytes, strict=True)
    )
    assert moved.timeline.makespan >= kept.timeline.makespan
    copies = [action for actions in moved.schedule for action in actions if action.op.is_copy]
    assert copies and all(seconds > 0 for seconds in moved.costs.costs.copy)
