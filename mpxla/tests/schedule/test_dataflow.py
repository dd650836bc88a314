"""What reads what, and what crosses ranks."""

import pytest

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Op
from mpxla.schedule.dataflow import Dataflow, Kind

pytestmark = pytest.mark.unit

# Stages 0 and 2 share rank 0; 0 -> 2 skips a stage; 0 -> 1 has no gradient.
FLOW = Dataflow.of((0, 1, 0), {(0, 1), (1, 2), (0, 2)}, {(2, 1), (2, 0)}, training=True)


def test_forward_reads_forwards_of_earlier_stages():
    assert FLOW.reads(Op.FORWARD, 0) == []
    assert FLOW.reads(Op.FORWARD, 2) == [Kind(0, Op.FORWARD), Kind(1, Op.FORWARD)]


def test_backward_reads_its_forward_and_gradients():
    assert FLOW.reads(Op.BACKWARD, 2) == [Kind(2, Op.FORWARD)]
    assert FLOW.reads(Op.BACKWARD, 0) == [Kind(0, Op.FORWARD), Kind(2, Op.BACKWARD)]


def test_only_edges_between_ranks_are_sent():
    assert FLOW.sends() == [
        Kind(0, Op.SEND_FORWARD, 1),
        Kind(1, Op.SEND_FORWARD, 2),
        Kind(2, Op.SEND_BACKWARD, 1),
    ]


def test_without_training_there_are_no_gradients():
    flow = Dataflow.of((0, 1), {(0, 1)}, {(1, 0)}, training=False)
    assert flow.sends() == [Kind(0, Op.SEND_FORWARD, 1)]
    assert flow.computes() == [Kind(0, Op.FORWARD), Kind(1, Op.FORWARD)]


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        ({(0, 3)}, (), r"forward edge 0 -> 3 names a stage outside 0\.\.2"),
        ({(1, 1)}, (), "forward edge 1 -> 1 does not go to a later one"),
        ({(2, 1)}, (), "forward edge 2 -> 1 does not go to a later one"),
        ({(0, 1)}, {(2, 1)}, "backward edge 2 -> 1 has no forward edge 1 -> 2"),
        ({(0, 1)}, {(0, 1)}, "backward edge 0 -> 1 has no forward edge 1 -> 0"),
        ({(0, 1)}, {(-1, 0)}, r"backward edge -1 -> 0 names a stage outside 0\.\.2"),
    ],
)
def test_edges_that_do_not_fit(forward, backward, message):
    with pytest.raises(ScheduleError, match=message):
        Dataflow.of((0, 1, 2), forward, backward, training=True)


def test_all_bad_edges_are_named():
    with pytest.raises(ScheduleError, match=r"do not fit 2 stages: .*1 -> 0.*; .*4 -> 2"):
        Dataflow.of((0, 1), {(1, 0)}, {(4, 2)}, training=True)
