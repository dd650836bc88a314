"""Schedules that users type: what is accepted, and the picture when one is refused."""

import pytest

from mpxla.config import Config
from mpxla.errors import ScheduleError
from mpxla.schedule.action import format_schedule
from mpxla.schedule.choice import custom_schedule, placement_of
from mpxla.schedule.custom import CustomSchedule
from mpxla.schedule.generate import zero_bubble

pytestmark = pytest.mark.unit

GOOD = """
0F0 0F1 .   0B0 0B1
.   1F0 1B0 1F1 1B1
"""


def test_a_text_of_computes_gets_transfers_and_reductions():
    custom = CustomSchedule(GOOD, 2, 2, 2)
    assert custom.placement == (0, 1)
    assert not custom.has_transfers
    assert format_schedule(custom.lower({(0, 1)}, {(1, 0)})).splitlines() == [
        "0F0 0SEND_F0>1 0F1 0RECV_B0<1 0SEND_F1>1 0B0 0RECV_B1<1 0B1 0REDUCE",
        "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1REDUCE",
    ]


def test_a_text_with_transfers_is_taken_as_it_is():
    text = format_schedule(CustomSchedule(GOOD, 2, 2, 2).lower({(0, 1)}, {(1, 0)}))
    custom = CustomSchedule(text, 2, 2, 2)
    assert custom.has_transfers
    assert format_schedule(custom.lower({(0, 1)}, {(1, 0)})) == text


def test_a_text_places_stages():
    text = format_schedule(zero_bubble(4, (0, 1, 1, 0), 4))
    assert CustomSchedule(text, 2, 4, 4).placement == (0, 1, 1, 0)


def test_the_configuration_brings_it():
    config = Config(pipeline_parallel_degree=2, microbatches=2, pipeline="custom", schedule=GOOD)
    assert config.active_microbatches == 2
    assert placement_of(config) == (0, 1)
    assert custom_schedule(Config()) is None
    assert placement_of(Config(pipeline="zero_bubble_v", pipeline_parallel_degree=2)) == (
        *(0, 1),
        *(1, 0),
    )
    assert placement_of(Config(pipeline_parallel_degree=2, virtual_pipeline_degree=2)) == (
        *(0, 1),
        *(0, 1),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0F1 0B0 0B1", "the text has 1 lines for 2 pipeline ranks. Write one line per rank"),
        ("0F0 1B0\n1F0 0B0", r"(?s)rank 1, step 0: stage 1 is on rank 0 already.*>>1F0<<"),
        ("0F0 0B0\n2F0 2B0", r"the text names stages \[0, 2\], without \[1\]"),
        ("1F0 1B0\n0F0 0B0", "stage 0 is on rank 1. Put it on the first line"),
        ("0F0 0B0\n1F0 1B0", r"runs microbatches \[0\], but a step has 2"),
        ("0F0 0F1\n1F0 1F1", "the text has no backwards"),
        ("0F0 0F1 0X0\n1F0", "'0X0' is not an action"),
        (
            "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0",
            r"(?s)cannot run in their order.*>>0B0<<.*\[1F1\].*rank 1 is blocked at step 0",
        ),
        ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1", "Rank 0 lacks 0B1"),
        (
            "0F0 0F1 0SEND_F0>1 0SEND_F1>1 0RECV_B1<1 0B1 0RECV_B0<1 0B0\n"
            "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0",
            r"(?s)Deadlock: rank 0 -> rank 1 -> rank 0 wait for each other.*>>0SEND_F1>1<<",
        ),
    ],
)
def test_texts_that_are_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        CustomSchedule(text, 2, 2, 2)


def test_too_many_microbatches_in_flight():
    with pytest.raises(
        ScheduleError, match="stage 0 has 2 microbatches in flight, but active_microbatches is 1"
    ):
        CustomSchedule(GOOD, 2, 2, 1)


def test_edges_that_the_text_does_not_serve():
    text = format_schedule(CustomSchedule(GOOD, 2, 2, 2).lower({(0, 1)}, {(1, 0)}))
    custom = CustomSchedule(text, 2, 2, 2)
    from mpxla.schedule.simulate import simulate

    with pytest.raises(ScheduleError, match="there is no backward edge 1 -> 0"):
        simulate(custom.lower({(0, 1)}, set()), custom.placement, {(0, 1)}, set())
