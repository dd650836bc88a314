"""What follows from times, however they came about."""

import pytest

from mpxla.schedule.action import parse_schedule
from mpxla.schedule.timeline import Span, Timeline

pytestmark = pytest.mark.unit


def timeline(text, starts, ends, placement):
    schedule = tuple(map(tuple, parse_schedule(text)))
    return Timeline(placement, schedule, starts, ends)


MEASURED = timeline(
    """
    0F0 1F0 0F1 1B0 0B0 0REDUCE
    2F0
    """,
    ((0.0, 1.0, 2.0, 3.0, 4.0, 9.0), (2.0,)),
    ((1.0, 2.0, 3.0, 4.0, 8.0, 10.0), (4.5,)),
    (0, 0, 1),
)


def test_makespan_is_the_last_end():
    assert MEASURED.makespan == 10


def test_bubble_is_the_time_without_forwards_and_backwards():
    assert MEASURED.bubble == pytest.approx(0.475)


def test_peaks_count_from_forward_to_backward():
    assert MEASURED.stage_peaks == (2, 1, 1)


def test_spans_pair_actions_with_times():
    assert [list(map(str, [span.action for span in spans])) for spans in MEASURED.spans] == [
        ["0F0", "1F0", "0F1", "1B0", "0B0", "0REDUCE"],
        ["2F0"],
    ]
    assert MEASURED.spans[1] == (Span(MEASURED.schedule[1][0], 2.0, 4.5),)


def test_evaluation_keeps_nothing():
    run = timeline("0F0 0F1 1F0\n.", ((0.0, 1.0, 2.0), ()), ((1.0, 2.0, 3.0), ()), (0, 0))
    assert run.stage_peaks == (1, 1)
    assert run.bubble == 0.5


def test_nothing_took_any_time():
    run = timeline("0F0", ((0.0,),), ((0.0,),), (0,))
    assert (run.makespan, run.bubble) == (0.0, 0.0)
