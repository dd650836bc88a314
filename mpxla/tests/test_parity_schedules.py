"""Every schedule trains with the numbers of plain PyTorch, and holds what it promised to hold."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.config import Config
from mpxla.schedule.choice import custom_schedule, placement_of
from mpxla.schedule.generate import generate
from mpxla.schedule.timeline import stage_peaks
from mpxla.tests.parity import Case, train, train_plainly
from mpxla.tests.parity_checks import assert_parity
from mpxla.tests.ranks.run import run_ranks

# Only stage 0 splits its backwards, and finishes them late.
OWN = """
0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W1 0W2
1F0 1B0 1F1 1B1 1F2 1B2
"""

CASES = [
    Case("gpt", 2, 4, "zero_bubble"),
    Case("twice", 2, 4, "eager_1f1b"),
    Case("conv_net", 2, 4, "zero_bubble_v"),
    Case("mlp", 2, 4, "interleaved", keys=(("virtual_pipeline_degree", 2),)),
    Case("unet", 2, 3, "custom", keys=(("schedule", OWN),)),
]
NAMES = ("gpt", "conv_net", "unet", "twice", "shared")
SCHEDULES = [
    ("eager_1f1b", ()),
    ("zero_bubble", ()),
    ("zero_bubble_v", ()),
    ("interleaved", (("virtual_pipeline_degree", 2),)),
    ("zero_bubble", (("virtual_pipeline_degree", 2),)),
    ("simple", (("virtual_pipeline_degree", 2),)),
    ("zero_bubble", (("active_microbatches", 1),)),
]


def sweep() -> list[Any]:
    """Slow: every schedule on three ranks, and on two where `CASES` has none of them, with 2 or 6
    microbatches and models in turn; long: every one of them with four models.
    """
    found = []
    for (r, ranks), (m, count), (s, (pipeline, keys)) in product(
        enumerate((2, 3)), enumerate((2, 6)), enumerate(SCHEDULES)
    ):
        for name in NAMES:
            is_next = name == NAMES[(s + 2 * r + m) % len(NAMES)] and (s + r + m) % 2 == 0
            has_run = any((c.pipeline, c.keys) == (pipeline, keys) for c in CASES)
            is_long = not is_next or (ranks == 2 and has_run)
            case = Case(name, ranks, count, pipeline, keys=keys)
            found.append(pytest.param(case, marks=[pytest.mark.long] * is_long))
    return found


def check(case: Case) -> None:
    observed = run_ranks(train, case.stages, case, timeout_s=200)
    assert_parity(observed, train_plainly(case))
    config = Config(**case.config())
    placement = placement_of(config)
    custom = custom_schedule(config)
    lists = (
        custom.lists
        if custom is not None
        else generate(
            config.pipeline, config.microbatches, placement, config.active_microbatches, True
        )
    )
    promised = stage_peaks(lists, len(placement))
    assert max(promised) <= config.active_microbatches
    for rank, found in enumerate(observed):
        assert found.later_compilations == 0, f"rank {rank}"
        assert found.placement == placement
        assert found.peaks == {s: promised[s] for s in found.with_backward if placement[s] == rank}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case.subject == "gpt")) for case in CASES],
    ids=str,
)
def test_schedule_trains_as_in_one_process(case):
    check(case)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", sweep(), ids=str)
def test_schedule_trains_as_in_one_process_everywhere(case):
    check(case)


def gradient_with_batches_of_two():
    """Runs on every rank: the gradient of a step to which two ranks bring a batch each."""
    smp.init(
        {
            "tensor_parallel_degree": 2,
            "ddp": True,
            "pipeline": "custom",
            "schedule": "0F0 0F1 0B1 0B0",
        }
    )
    layer = nn.Linear(1, 1, bias=False)
    model = smp.DistributedModel(layer)

    @smp.step
    def step(model, x):
        model.backward(model(x).sum())

    step(model, torch.full((1, 1), 1.0 + smp.rank()))
    return layer.weight.grad.item()


@pytest.mark.ranks
def test_a_text_counts_the_microbatches_of_all_ranks_of_a_tensor_group():
    assert run_ranks(gradient_with_batches_of_two, 2, env={"MPXLA_EAGER": "1"}) == [1.5, 1.5]
