"""Schedules of some of the microbatches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpxla.schedule.action import format_schedule, parse_schedule
from mpxla.schedule.copies import add_copies
from mpxla.schedule.generate import generate
from mpxla.schedule.lower import actions_of, add_communication, add_reduce
from mpxla.schedule.simulate import simulate
from mpxla.tests.schedule.test_properties import NAMES, pipelines

pytestmark = pytest.mark.unit


def test_the_first_ones_take_the_numbers():
    (actions,) = parse_schedule("0F0 0SEND_F0>1 0F1 0RECV_B0<1 0B0 0F2 0B1 0B2 0REDUCE")
    expected = "0F1 0SEND_F1>1 0F2 0RECV_B1<1 0B1 0B2 0REDUCE"
    assert format_schedule([actions_of(actions, (1, 2))]) == expected
    assert format_schedule([actions_of(actions, (2,), reduces=False)]) == (
        "0F2 0SEND_F2>1 0RECV_B2<1 0B2"
    )
    assert actions_of(actions, (0, 1, 2)) == tuple(actions)


@settings(max_examples=100, deadline=None)
@given(pipelines(), NAMES, st.booleans(), st.data())
def test_a_part_of_a_schedule_is_free_of_deadlock(pipeline, name, has_copies, data):
    placement, forward, backward, count, active = pipeline
    compute = generate(name, count, placement, active, True)
    schedule = add_reduce(add_communication(compute, placement, forward, backward))
    schedule = add_copies(schedule, 1) if has_copies else schedule
    chosen = tuple(range(data.draw(st.integers(1, count))))
    part = [actions_of(actions, chosen) for actions in schedule]
    simulate(part, placement, forward, backward, rendezvous=True)
