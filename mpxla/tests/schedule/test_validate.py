"""Every way in which one list can be wrong by itself, and the text that says so."""

import pytest

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Action, Op, parse_schedule
from mpxla.schedule.simulate import simulate

pytestmark = pytest.mark.unit

GOOD = """
0F0 0SEND_F0>1 0RECV_B0<1 0B0
1RECV_F0<0 1F0 1B0 1SEND_B0>0
"""
ONE = {(0, 1)}, {(1, 0)}


def check(schedule, placement=(0, 1), edges=ONE):
    if isinstance(schedule, str):
        schedule = parse_schedule(schedule)
    return simulate(schedule, placement, *edges)


def test_a_good_schedule_passes():
    check(GOOD)
    check(GOOD + "\n.")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "1RECV_F0<0 1F0",
            "1F0 1RECV_F0<0",
            "Rank 1, step 0, 1F0: it needs the values from stage 0 for microbatch 0 first, but "
            "1RECV_F0<0 is only at step 1. Put 1RECV_F0<0 before 1F0",
        ),
        (
            "1RECV_F0<0 ",
            "",
            "Rank 1, step 0, 1F0: it needs the values from stage 0 .* but 1RECV_F0<0 is missing",
        ),
        (
            "0RECV_B0<1 0B0",
            "0B0 0RECV_B0<1",
            "Rank 0, step 2, 0B0: it needs the gradients from stage 1 .*only at step 3",
        ),
        ("0RECV_B0<1 ", "", "0B0: it needs the gradients from stage 1 .* 0RECV_B0<1 is missing"),
        ("1F0 1B0", "1B0 1F0", "1B0: it needs the forward of stage 1 for microbatch 0 first"),
        ("0F0 0SEND_F0>1", "0SEND_F0>1 0F0", "0SEND_F0>1: it needs the forward of stage 0"),
        ("1B0 1SEND_B0>0", "1SEND_B0>0 1B0", "1SEND_B0>0: it needs the backward of stage 1"),
        ("0F0 ", "0F0 0F0 ", "Rank 0, step 1, 0F0: the action is there twice; .* at step 0"),
        ("0B0", "0B0 0SEND_F0>1", "step 4, 0SEND_F0>1: the action is there twice; .* at step 1"),
        (" 1SEND_B0>0", "", r"Rank 1 lacks 1SEND_B0>0: every stage runs microbatches 0\.\.0"),
        (" 0RECV_B0<1 0B0", "", "Rank 0 lacks 0B0, 0RECV_B0<1"),
        ("0F0 ", "0F1 0F0 ", r"Rank 0 lacks 0B1, 0SEND_F1>1, 0RECV_B1<1: .*microbatches 0\.\.1"),
        ("0B0", "0B0 0REDUCE", "Rank 1 lacks 1REDUCE"),
        (" 0B0", " 0REDUCE 0B0", "0REDUCE: it needs the backward of stage 0 for microbatch 0"),
        ("0B0", "0B0 1REDUCE", "1REDUCE: stage 1 lives on rank 1. Move the action there"),
        ("0B0", "0B0 1F0", "Rank 0, step 4, 1F0: stage 1 lives on rank 1"),
        ("0B0", "0B0 7F0", r"7F0: stage 7 does not exist; there are stages 0\.\.1"),
        ("0B0", "0B0 0SEND_F0>7", "0SEND_F0>7: stage 7 does not exist"),
        ("0B0", "0B0 0B3", r"0B3: microbatch 3 does not exist; forwards run 0\.\.0"),
        ("0B0", "0B0 0SEND_F3>1", "0SEND_F3>1: microbatch 3 does not exist"),
        ("0B0", "0B0 0SEND_B0>1", "0SEND_B0>1: there is no backward edge 0 -> 1"),
        ("0B0", "0B0 0RECV_F0<1", "0RECV_F0<1: there is no forward edge 1 -> 0"),
    ],
)
def test_a_broken_schedule(old, new, message):
    broken = GOOD.replace(old, new, 1)
    assert broken != GOOD
    with pytest.raises(ScheduleError, match=message) as error:
        check(broken)
    assert ">>" in str(error.value)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action(0, Op.FORWARD), "the action names no microbatch. Add one"),
        (Action(0, Op.FORWARD, 0, 1), "only transfers have a peer. Leave it out"),
        (Action(0, Op.FORWARD, -1), "microbatch -1 does not exist"),
        (Action(-1, Op.FORWARD, 0), "stage -1 does not exist"),
        (Action(0, Op.SEND_FORWARD, 0), "the transfer names no stage at its other end"),
        (Action(0, Op.SEND_FORWARD, None, 1), "the action names no microbatch"),
        (Action(0, Op.REDUCE, 0), "a reduction has neither microbatch nor peer. Write 0REDUCE"),
    ],
)
def test_a_malformed_action(action, message):
    schedule = parse_schedule(GOOD)
    schedule[0].append(action)
    with pytest.raises(ScheduleError, match=message):
        check(schedule)


def test_a_transfer_within_a_rank():
    with pytest.raises(ScheduleError, match="stages 0 and 1 share rank 0, so nothing travels"):
        check("0F0 0SEND_F0>1 1F0 1B0 0B0", placement=(0, 0))


def test_a_stage_needs_the_one_before_on_the_same_rank():
    with pytest.raises(ScheduleError, match=r"1F0: it needs the forward of stage 0 .* at step 1"):
        check("1F0 0F0 1B0 0B0", placement=(0, 0))
    with pytest.raises(ScheduleError, match=r"0B0: it needs the backward of stage 1 .* at step 3"):
        check("0F0 1F0 0B0 1B0", placement=(0, 0))


def test_a_reduction_must_follow_the_last_backward():
    with pytest.raises(
        ScheduleError, match=r"Rank 0, step 2, 0REDUCE: .* backward of stage 0 for microbatch 1"
    ):
        check("0F0 0B0 0REDUCE 0F1 0B1", placement=(0,), edges=((), ()))


def test_evaluation_has_neither_gradients_nor_reductions():
    with pytest.raises(ScheduleError, match="no backwards, so gradients do not travel"):
        check("0F0 0SEND_F0>1 0RECV_B0<1\n1RECV_F0<0 1F0 1SEND_B0>0")
    with pytest.raises(ScheduleError, match="no backwards, so nothing is to be reduced"):
        check("0F0 0SEND_F0>1\n1RECV_F0<0 1F0 1REDUCE")


def test_many_missing_actions_are_counted():
    forwards = " ".join(f"0F{m}" for m in range(10))
    with pytest.raises(ScheduleError, match=r"Rank 0 lacks 0B0, .* 0B7 and 2 more: every stage"):
        check(f"{forwards}\n1F0 1B0", edges=((), ()))


@pytest.mark.parametrize(
    ("text", "placement", "message"),
    [
        ("0F0", (0, 1), r"has 1 lists of actions, but placement \(0, 1\) uses rank 1"),
        (".", (0,), "The schedule has no actions"),
        ("", (), r"placement \(\) is not the pipeline rank of every stage"),
        ("0F0", (-1,), r"placement \(-1,\) is not the pipeline rank of every stage"),
    ],
)
def test_schedule_and_placement_that_do_not_fit(text, placement, message):
    with pytest.raises(ScheduleError, match=message):
        check(text, placement, ((), ()))
