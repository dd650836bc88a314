"""The picture in a schedule's error."""

import pytest

from mpxla.schedule.action import parse_schedule
from mpxla.schedule.grid import Cell, format_failure

pytestmark = pytest.mark.unit


def test_marks_the_failing_cell_and_the_blocked_ones():
    text = format_failure(
        parse_schedule("0F0 0B0\n1F0\n2F0"),
        Cell(0, 1),
        "Bad.",
        {Cell(0, 1): "1B0", Cell(1, 0): "0F1"},
    )
    assert text.splitlines() == [
        "Bad.",
        "  step    0      1",
        "  rank 0  0F0    >>0B0<<",
        "  rank 1  [1F0]",
        "  rank 2  2F0",
        "rank 0 is blocked at step 1 in 0B0: waits for 1B0",
        "rank 1 is blocked at step 0 in 1F0: waits for 0F1",
        "finished: rank 2",
    ]


def test_marks_a_place_after_the_end():
    text = format_failure(parse_schedule("0F0\n1F0 1B0"), Cell(0, 1), "Lacks.")
    assert text.splitlines()[2] == "  rank 0  0F0  >><<"


def test_marks_a_place_after_the_end_of_the_longest_list():
    text = format_failure(parse_schedule("0F0 0B0\n1F0"), Cell(0, 2), "Lacks.")
    assert text.splitlines()[1:3] == ["  step    0    1    2", "  rank 0  0F0  0B0  >><<"]


def test_shows_the_part_around_the_failure():
    schedule = parse_schedule("\n".join(" ".join(f"{r}F{m}" for m in range(99)) for r in range(40)))
    lines = format_failure(schedule, Cell(30, 50), "Bad.").splitlines()
    assert lines[1].split() == ["step", *map(str, range(45, 55))]
    assert [line.split()[1] for line in lines[2:-1]] == [str(rank) for rank in range(22, 38)]
    assert ">>30F50<<" in lines[2 + 30 - 22]
    assert lines[-1] == "  (of 99 steps and 40 ranks)"
