"""Actions and schedules as text, in both directions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Action, Op, format_schedule, parse_action, parse_schedule

pytestmark = pytest.mark.unit

TEXTS = {
    "2F0": Action(2, Op.FORWARD, 0),
    "11B30": Action(11, Op.BACKWARD, 30),
    "0SEND_F2>1": Action(0, Op.SEND_FORWARD, 2, 1),
    "1RECV_F2<0": Action(1, Op.RECV_FORWARD, 2, 0),
    "1SEND_B2>0": Action(1, Op.SEND_BACKWARD, 2, 0),
    "0RECV_B2<1": Action(0, Op.RECV_BACKWARD, 2, 1),
    "0REDUCE": Action(0, Op.REDUCE),
}

NUMBERS = st.integers(0, 2000)
COMPUTES = st.tuples(
    NUMBERS, st.sampled_from([op for op in Op if op.is_compute]), NUMBERS, st.none()
).map(Action._make)
TRANSFERS = st.tuples(
    NUMBERS, st.sampled_from([op for op in Op if op.is_transfer]), NUMBERS, NUMBERS
).map(Action._make)
REDUCTIONS = NUMBERS.map(lambda stage: Action(stage, Op.REDUCE))


@pytest.mark.parametrize(("text", "action"), TEXTS.items())
def test_prints_and_parses(text, action):
    assert str(action) == text
    assert parse_action(text) == action


@given(st.one_of(COMPUTES, TRANSFERS, REDUCTIONS))
def test_parse_is_the_inverse_of_str(action):
    assert parse_action(str(action)) == action


@given(st.lists(st.lists(st.one_of(COMPUTES, TRANSFERS, REDUCTIONS), max_size=5), max_size=5))
def test_parse_schedule_is_the_inverse_of_format(schedule):
    assert parse_schedule(format_schedule(schedule)) == schedule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "0",
        "0F",
        "0X1",
        "0F-1",
        "0SEND_F2",
        "0SEND_F2>",
        "0F2>1",
        "0REDUCE3",
        "0F0 0F1",
        "²F0",
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ScheduleError, match=r"is not an action\. Write stage, operation") as error:
        parse_action(text)
    assert repr(text) in str(error.value)


def test_an_arrow_against_the_operation_is_refused():
    with pytest.raises(ScheduleError, match=r"'0SEND_F2<1' is not an action.*Write 0SEND_F2>1"):
        parse_action("0SEND_F2<1")


def test_schedule_can_be_typed_as_a_timeline():
    text = """
        0F0 .   0B0
        .
        .   1F0
    """
    assert [[str(action) for action in actions] for actions in parse_schedule(text)] == [
        ["0F0", "0B0"],
        [],
        ["1F0"],
    ]


def test_error_in_a_schedule_names_the_line():
    with pytest.raises(ScheduleError, match="'1G0'") as error:
        parse_schedule("0F0 0B0\n\n1F0 1G0")
    assert error.value.__notes__ == ["in line 3 of the schedule (rank 1): 1F0 1G0"]


def test_format_is_one_line_per_rank():
    schedule = [[parse_action("0F0"), parse_action("0SEND_F0>1")], [], [parse_action("1REDUCE")]]
    assert format_schedule(schedule) == "0F0 0SEND_F0>1\n.\n1REDUCE"


def test_other_end_of_a_transfer():
    for one, other in (("0SEND_F2>1", "1RECV_F2<0"), ("3SEND_B4>1", "1RECV_B4<3")):
        assert str(parse_action(one).other_end()) == other
        assert str(parse_action(other).other_end()) == one


def test_a_compute_has_no_other_end():
    with pytest.raises(ScheduleError, match="2F0 has no other end, because it is not a transfer"):
        parse_action("2F0").other_end()


def test_kinds_of_operations():
    split = [Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT]
    assert [op for op in Op if op.is_compute] == [Op.FORWARD, Op.BACKWARD, *split]
    assert [op for op in Op if op.begins_backward] == [Op.BACKWARD, Op.INPUT_GRADIENT]
    assert [op for op in Op if op.ends_backward] == [Op.BACKWARD, Op.WEIGHT_GRADIENT]
    assert [op for op in Op if op.is_send] == [Op.SEND_FORWARD, Op.SEND_BACKWARD]
    assert [op for op in Op if op.is_receive] == [Op.RECV_FORWARD, Op.RECV_BACKWARD]
    assert not any(op.is_transfer for op in (Op.FORWARD, Op.BACKWARD, Op.REDUCE))
