"""Which schedule a configuration means, and how many microbatches each stage has in flight."""

import pytest

from mpxla.config import Config
from mpxla.errors import ScheduleError
from mpxla.schedule.choice import compute_actions, in_flight, placement_of

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
