"""Which schedule a configuration means, and how many microbatches each stage has in flight."""

import pytest

from mpxla.config import Config
from mpxla.errors import ScheduleError
from mpxla.schedule.choice import compute_actions, in_flight, paces, placement_of
from mpxla.schedule.lower import add_communication
from mpxla.schedule.simulate import Costs, simulate

pytestmark = pytest.mark.unit


def peaks(**keys):
    config = Config(**{"pipeline_parallel_degree": 4, "microbatches": 8, **keys})
    return in_flight(config, placement_of(config), training=True)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (4, 3, 2, 1)),
        ({"microbatches": 2}, (2, 2, 2, 1)),
        ({"active_microbatches": 2}, (2, 2, 2, 1)),
        ({"pipeline": "simple"}, (8, 8, 8, 8)),
        ({"pipeline": "simple", "active_microbatches": 3}, (3, 3, 3, 3)),
        ({"pipeline": "zero_bubble"}, (4, 4, 4, 4)),
        ({"pipeline_parallel_degree": 2, "pipeline": "zero_bubble_v"}, (4, 3, 2, 1)),
        ({"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2}, (4, 3, 2, 1)),
        (
            {
                "pipeline_parallel_degree": 2,
                "microbatches": 3,
                "pipeline": "custom",
                "schedule": "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2",
            },
            (2, 1),
        ),
    ],
)
def test_microbatches_in_flight(keys, expected):
    assert peaks(**keys) == expected


def test_evaluation_keeps_nothing():
    config = Config(pipeline_parallel_degree=3, microbatches=4)
    assert in_flight(config, (0, 1, 2), training=False) == (0, 0, 0)


@pytest.mark.parametrize(
    ("pipeline", "training"), [("interleaved", True), ("simple", True), ("eager_1f1b", False)]
)
def test_compute_counts_alike_where_no_stage_has_forwards_in_advance(pipeline, training):
    config = Config(pipeline_parallel_degree=2, microbatches=8, pipeline=pipeline)
    counts = in_flight(config, (0, 1), training)
    assert paces(config, counts, training, 1 / 3) == (1.0, 1.0)


def test_compute_of_early_stages_counts_less_under_eager_1f1b():
    config = Config(pipeline_parallel_degree=2, microbatches=8, pipeline="eager_1f1b")
    early, late = paces(config, in_flight(config, (0, 1), True), True, 1 / 3)
    assert early + late == pytest.approx(2)
    assert early / late == pytest.approx((7 - 2 / 3) / 7)
    single = Config(pipeline_parallel_degree=2, microbatches=1, pipeline="eager_1f1b")
    assert paces(single, (1, 1), True, 1 / 3) == (1.0, 1.0), "one microbatch: any cut is as good"
    three = Config(pipeline_parallel_degree=2, microbatches=3, pipeline="eager_1f1b")
    assert paces(three, (3, 1), True, 1.0) == (1.0, 1.0), "backwards that take nothing"


@pytest.mark.parametrize("forward_share", [0.25, 1 / 3, 0.5])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_paced_stages_make_the_simulated_step_shorter(num_ranks, forward_share):
    gains = []
    for num_microbatches in (num_ranks, 2 * num_ranks, 4 * num_ranks, 8 * num_ranks):
        config = Config(
            pipeline_parallel_degree=num_ranks,
            microbatches=num_microbatches,
            active_microbatches=num_microbatches,
            pipeline="eager_1f1b",
        )
        placement = placement_of(config)
        counts = in_flight(config, placement, True)
        shares = [1 / pace for pace in paces(config, counts, True, forward_share)]
        shares = [share / sum(shares) for share in shares]

        def step_s(shares, config=config, placement=placement):
            edges = [(stage, stage + 1) for stage in range(len(placement) - 1)]
            back = [(target, source) for source, target in edges]
            lists = compute_actions(config, placement, True)
            costs = Costs(
                forward=[forward_share * share for share in shares],
                backward=[(1 - forward_share) * share for share in shares],
            )
            schedule = add_communication(lists, placement, edges, back)
            return simulate(schedule, placement, edges, back, costs, rendezvous=False).makespan

        paced, equal = step_s(shares), step_s([1 / num_ranks] * num_ranks)
        bound = 1 + max(
            share * (num_microbatches - 1 - (count - 1) * forward_share)
            for share, count in zip(shares, counts, strict=True)
        )
        assert paced >= bound * (1 - 1e-9), "the docstring's step is the least possible one"
        gains.append(equal / paced)
    assert min(gains) > 0.99
    assert max(gains) > 1.03


def test_a_text_for_other_stages_is_refused():
    config = Config(
        pipeline_parallel_degree=2,
        microbatches=1,
        pipeline="custom",
        schedule="0F0 0B0\n1F0 1B0",
    )
    with pytest.raises(ScheduleError, match=r"on ranks \[0, 1\], but the step .* \[0, 1, 0\]"):
        compute_actions(config, (0, 1, 0), training=True)
    forwards = compute_actions(config, (0, 1, 0), training=False)
    assert [[str(action) for action in line] for line in forwards] == [["0F0", "2F0"], ["1F0"]]
