"""Copies of saved values to the host: where they go, when they are done, and what is refused."""

import pytest

from mpxla.cli.main import main
from mpxla.errors import ScheduleError
from mpxla.schedule.action import Action, Op, format_schedule, parse_schedule
from mpxla.schedule.analysis import StageBytes, peak_bytes
from mpxla.schedule.copies import add_copies, has_copies, offloads_done
from mpxla.schedule.generate import generate
from mpxla.schedule.lower import add_communication, add_reduce
from mpxla.schedule.placement import place_stages
from mpxla.schedule.simulate import Costs, simulate

pytestmark = pytest.mark.unit

SCHEDULES = [
    ("simple", 1),
    ("interleaved", 1),
    ("interleaved", 2),
    ("eager_1f1b", 1),
    ("zero_bubble", 1),
    ("zero_bubble_v", 2),
]


def copied(text, horizon):
    return format_schedule(add_copies(parse_schedule(text), horizon))


def test_microbatches_leave_after_their_forward_and_come_back_the_horizon_before_their_backward():
    text = "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"
    assert copied(text, 1) == (
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0LOAD0 0F3 0OFFLOAD3 0LOAD1 0B0 0LOAD2 0B1 "
        "0LOAD3 0B2 0B3"
    )


def test_a_microbatch_whose_memory_no_compute_would_find_free_stays():
    text = "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"
    assert "OFFLOAD" not in copied(text, 2)
    assert copied("0F0 0F1 0F2 0B0 0B1 0B2", 1).count("OFFLOAD") == 0
    assert copied("0F0 0F1 0F2 0F3", 1).count("OFFLOAD") == 0, "evaluation keeps nothing"


def test_sends_of_the_forward_go_first():
    text = "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0F3 0B0 0B1 0B2 0B3"
    assert "0F0 0SEND_F0>1 0OFFLOAD0 0F1" in copied(text, 1)


def test_the_first_compute_hides_an_offload_and_the_second_finds_its_memory_free():
    (actions,) = parse_schedule("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0F3 0LOAD0 0LOAD1 0B0 0B1")
    first, second = Action(0, Op.OFFLOAD, 0), Action(0, Op.OFFLOAD, 1)
    assert offloads_done(actions) == {4: (first,), 5: (second,)}
    (loading,) = parse_schedule("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0LOAD0 0B2 0B0")
    assert offloads_done(loading) == {4: (first,), 5: (second,)}, "memory is free before a load"
    (hasty,) = parse_schedule("0F0 0OFFLOAD0 0LOAD0 0B0")
    assert offloads_done(hasty) == {2: (first,)}, "a load waits for its offload in any case"


@pytest.mark.parametrize("rendezvous", [True, False])
@pytest.mark.parametrize(("pipeline", "per_rank"), SCHEDULES)
@pytest.mark.parametrize("horizon", [1, 3])
def test_all_schedules_run_with_less_memory(pipeline, per_rank, horizon, rendezvous):
    placement = place_stages(pipeline, 4, per_rank)
    edges = {(s, s + 1) for s in range(len(placement) - 1)}
    back = {(t, s) for s, t in edges}
    compute = generate(pipeline, 12, placement, 12, True)
    plain = add_reduce(add_communication(compute, placement, edges, back))
    schedule = add_copies(plain, horizon)
    assert has_copies(schedule) and parse_schedule(format_schedule(schedule)) == schedule
    for actions, before in zip(schedule, plain, strict=True):
        assert [a for a in actions if not a.op.is_copy] == before
        for load in (a for a in actions if a.op is Op.LOAD):
            place = actions.index(load)
            computes = [a for a in actions[place:] if a.op.is_compute]
            backward = next(a for a in computes if a.op.begins_backward and a[::2] == load[::2])
            assert computes.index(backward) == horizon
    held = [StageBytes(10, 4, 0, 10)] * len(placement)
    before, after = (peak_bytes(lists, held) for lists in (plain, schedule))
    assert all(now <= was for now, was in zip(after, before, strict=True))
    assert max(after) < max(before) or horizon > 1
    times = [
        simulate(lists, placement, edges, back, Costs(copy=0.1), rendezvous).makespan
        for lists in (plain, schedule)
    ]
    assert times[0] == pytest.approx(times[1]), "short copies are hidden"


def test_the_command_prints_them(capsys):
    words = ("--stages", "2", "--microbatches", "4", "--pipeline", "simple", "--actions")
    assert main(["schedule", *words, "--offload", "1"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("0F0 0SEND_F0>1 0OFFLOAD0 0F1") and "1LOAD3 1B2" in second
    assert main(["schedule", *words]) == 0
    assert "LOAD" not in capsys.readouterr().out


@pytest.mark.parametrize("rendezvous", [True, False])
def test_slow_copies_take_time_one_after_another_in_each_direction(rendezvous):
    text = "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0F3 0LOAD0 0B2 0B3 0B0 0LOAD1 0B1"

    def ends(copy):
        run = simulate(parse_schedule(text), (0,), (), (), Costs(copy=copy), rendezvous)
        return {str(span.action): span.end for span in run.spans[0]}

    assert ends(1.0)["0B1"] == 9, "LOAD1 begins with nothing left to hide it"
    slow = ends(3.0)
    # OFFLOAD0 runs from 1 to 4, and F2 needs its memory; OFFLOAD1 from 4 to 7, and so does F3.
    assert (slow["0F1"], slow["0F2"], slow["0F3"]) == (2, 5, 8)
    # LOAD0 runs from 8 to 11 beside B2 and B3; LOAD1 from 12 to 15.
    assert (slow["0B3"], slow["0B0"], slow["0B1"]) == (10, 12, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0F1 0OFFLOAD0 0B0 0B1", "saved values are on the host. Put 0LOAD0 before 0B0"),
        ("0F0 0LOAD0 0B0", "needs the saved values of stage 0 on the host for microbatch 0 first"),
        ("0OFFLOAD0 0F0 0B0", "needs the forward of stage 0 for microbatch 0 first"),
        ("0F0 0B0 0OFFLOAD0", "0B0 has read the saved values before. Put it before that"),
        ("0F0 0OFFLOAD0 0OFFLOAD0 0LOAD0 0B0", "there twice; it came first at step 1"),
        ("0F0 0OFFLOAD0 0F1", "there are no backwards, so nothing is saved. Remove it"),
        ("0F0 0OFFLOAD3 0B0", "microbatch 3 does not exist"),
    ],
)
def test_copies_that_cannot_be(text, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(parse_schedule(text), (0,), (), ())
