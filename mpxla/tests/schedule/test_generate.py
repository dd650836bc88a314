"""Generated orders against pictures, against the textbook rule, and by their bounds."""

import pytest

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Op, format_schedule, parse_schedule
from mpxla.schedule.generate import forward_only, generate, interleaved, simple

pytestmark = pytest.mark.unit

PLACEMENTS = [
    *(tuple(range(num_stages)) for num_stages in range(1, 9)),
    (0, 1, 0),
    (0, 1, 0, 1),
    (0, 0, 0),
    (0, 1, 2, 1),
    (0, 1, 1, 0),
    (0, 0, 1),
    (2, 0, 1),
    (0, 1, 2, 0, 1, 2, 0, 1),
]


def textbook_1f1b(num_stages, num_microbatches):
    """Warm up with one forward per later stage, alternate, drain."""
    schedule = []
    for stage in range(num_stages):
        warm_up = min(num_stages - stage - 1, num_microbatches)
        words = [f"{stage}F{m}" for m in range(warm_up)]
        for m in range(num_microbatches - warm_up):
            words += [f"{stage}F{m + warm_up}", f"{stage}B{m}"]
        words += [f"{stage}B{m}" for m in range(num_microbatches - warm_up, num_microbatches)]
        schedule.append(" ".join(words))
    return "\n".join(schedule)


def peaks(schedule, num_stages):
    """Most microbatches in flight per stage."""
    live, peak = [0] * num_stages, [0] * num_stages
    for actions in schedule:
        for action in actions:
            live[action.stage] += 1 if action.op is Op.FORWARD else -1
            peak[action.stage] = max(peak[action.stage], live[action.stage])
    return peak


def test_interleaved_is_1f1b():
    assert interleaved(6, (0, 1, 2, 3), 4) == parse_schedule(
        """
        0F0 0F1 0F2 0F3 .   .   .   0B0 0F4 0B1 0F5 0B2 .   0B3 .   0B4 .   0B5
        .   1F0 1F1 1F2 .   .   1B0 1F3 1B1 1F4 1B2 1F5 1B3 .   1B4 .   1B5
        .   .   2F0 2F1 .   2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 .   2B5
        .   .   .   3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
        """
    )


def test_interleaved_with_fewer_microbatches_than_stages():
    assert interleaved(2, (0, 1, 2), 5) == parse_schedule(
        """
        0F0 0F1 .   .   .   0B0 .   0B1
        .   1F0 1F1 .   1B0 .   1B1
        .   .   2F0 2B0 2F1 2B1
        """
    )


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_interleaved_is_the_textbook_order_on_linear_placements(num_stages):
    for num_microbatches in range(1, 20):
        for active in (num_stages, num_stages + 2, 100):
            schedule = interleaved(num_microbatches, range(num_stages), active)
            assert format_schedule(schedule) == textbook_1f1b(num_stages, num_microbatches)


def test_interleaved_with_few_active_microbatches_takes_a_ready_backward_first():
    assert interleaved(4, (0, 1, 2), 2) == parse_schedule(
        """
        0F0 0F1 .   .   .   0B0 0F2 0B1 0F3 .   .   0B2 .   0B3
        .   1F0 1F1 .   1B0 .   1B1 1F2 1F3 .   1B2 .   1B3
        .   .   2F0 2B0 2F1 2B1 .   .   2F2 2B2 2F3 2B3
        """
    )


def test_interleaved_on_one_rank_finishes_a_microbatch_before_the_next():
    assert interleaved(2, (0, 0, 0), 9) == parse_schedule(
        "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1"
    )


def test_interleaved_with_a_stage_that_comes_back():
    assert interleaved(3, (0, 1, 0), 9) == parse_schedule(
        """
        0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1 0F2 2F2 2B2 0B2
        1F0 1F1 1B0 1B1 1F2 1B2
        """
    )


def test_simple_fills_and_drains():
    assert simple(3, (0, 1)) == parse_schedule(
        """
        0F0 0F1 0F2 .   .   0B0 0B1 0B2
        .   1F0 1F1 1F2 1B0 1B1 1B2
        """
    )


def test_simple_runs_in_rounds_of_active_microbatches():
    assert simple(5, (0, 1), 2) == parse_schedule(
        """
        0F0 0F1 .   .   0B0 0B1 0F2 0F3 .   .   0B2 0B3 0F4 .   .   0B4
        .   1F0 1F1 1B0 1B1 .   .   1F2 1F3 1B2 1B3 .   .   1F4 1B4
        """
    )


def test_simple_takes_all_forwards_of_a_rank_before_its_backwards():
    assert simple(2, (0, 1, 0)) == parse_schedule(
        """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 1B0 1B1
        """
    )


def test_forward_only():
    assert forward_only(3, (0, 1, 0)) == parse_schedule(
        """
        0F0 0F1 2F0 2F1 0F2 2F2
        1F0 1F1 1F2
        """
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_everything_is_there_once_and_on_its_rank(placement):
    for num_microbatches in (1, 3, 9):
        for active in (1, 2, 4, 50):
            for name in ("interleaved", "simple"):
                schedule = generate(name, num_microbatches, placement, active, training=True)
                assert len(schedule) == max(placement) + 1
                found = [(r, a) for r, actions in enumerate(schedule) for a in actions]
                assert len(found) == len(set(found)) == 2 * num_microbatches * len(placement)
                assert all(placement[action.stage] == rank for rank, action in found)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bounds_of_what_is_in_flight(placement):
    num_stages = len(placement)
    for num_microbatches in (1, 4, 12):
        for active in (1, 2, 3, 50):
            bounds = [min(active, num_stages - stage) for stage in range(num_stages)]
            found = peaks(interleaved(num_microbatches, placement, active), num_stages)
            assert all(peak <= bound for peak, bound in zip(found, bounds, strict=True))
            found = peaks(simple(num_microbatches, placement, active), num_stages)
            assert found == [min(active, num_microbatches)] * num_stages


def test_every_stage_takes_microbatches_in_order():
    for placement in PLACEMENTS:
        for actions in interleaved(7, placement, 3):
            for stage in set(placement):
                for op in (Op.FORWARD, Op.BACKWARD):
                    order = [a.microbatch for a in actions if (a.stage, a.op) == (stage, op)]
                    assert order in ([], list(range(7)))


def test_a_rank_without_stages_has_nothing_to_do():
    assert interleaved(1, (0, 2), 2)[1] == []


def test_generate_dispatches_by_name():
    assert generate("simple", 4, (0, 1), 2, training=True) == simple(4, (0, 1), 2)
    assert generate("interleaved", 4, (0, 1), 2, training=True) == interleaved(4, (0, 1), 2)
    for name in ("simple", "interleaved"):
        assert generate(name, 4, (0, 1), 2, training=False) == forward_only(4, (0, 1))


def test_unknown_name():
    with pytest.raises(
        ScheduleError, match="'interleave' is not a schedule; the nearest is 'interleaved'"
    ):
        generate("interleave", 4, (0, 1), 2, training=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, (0, 1), 2), "num_microbatches is 0; use at least 1"),
        ((4, (0, 1), 0), "active_microbatches is 0; use at least 1"),
        ((4, (), 2), "placement names no stage"),
        ((4, (0, -1), 2), r"placement \(0, -1\) has a negative rank"),
        ((-1, (), -2), "num_microbatches is -1.*active_microbatches is -2.*names no stage"),
    ],
)
def test_arguments_that_make_no_schedule(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        interleaved(*arguments)
    with pytest.raises(ScheduleError, match=message):
        simple(*arguments)


def test_forward_only_checks_its_arguments():
    with pytest.raises(ScheduleError, match="num_microbatches is 0"):
        forward_only(0, (0, 1))
