"""The dry run: times under both semantics, deadlocks, and that it is fast."""

import time

import pytest

from mpxla.errors import ScheduleError
from mpxla.schedule.action import parse_schedule
from mpxla.schedule.generate import interleaved, simple
from mpxla.schedule.lower import add_communication, add_reduce
from mpxla.schedule.simulate import Costs, simulate
from mpxla.tests.schedule.per_rank import rank_bubbles, rank_peaks

pytestmark = pytest.mark.unit

ONE = {(0, 1)}, {(1, 0)}
EAGER_SENDS = """
0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0
"""


def chain(num_stages):
    forward = {(stage, stage + 1) for stage in range(num_stages - 1)}
    return forward, {(target, source) for source, target in forward}


def times(timeline, rank):
    return [f"{span.action} {span.start:g}-{span.end:g}" for span in timeline.spans[rank]]


@pytest.mark.parametrize("rendezvous", [True, False])
@pytest.mark.parametrize("generate", [interleaved, simple])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 8, 30])
def test_textbook_bubble(rendezvous, generate, num_ranks, num_microbatches):
    # (p - 1) / (m + p - 1): Narayanan et al., "Efficient Large-Scale Language Model Training on
    # GPU Clusters Using Megatron-LM", section 2.2.1.
    placement, edges = tuple(range(num_ranks)), chain(num_ranks)
    compute = generate(num_microbatches, placement, max(num_microbatches, num_ranks))
    schedule = add_reduce(add_communication(compute, placement, *edges))
    timeline = simulate(schedule, placement, *edges, rendezvous=rendezvous)
    expected = (num_ranks - 1) / (num_microbatches + num_ranks - 1)
    assert timeline.bubble == pytest.approx(expected)
    assert rank_bubbles(timeline) == pytest.approx([expected] * num_ranks)
    assert timeline.makespan == 2 * (num_microbatches + num_ranks - 1)


def test_peaks_of_1f1b_and_of_fill_and_drain():
    placement, edges = (0, 1, 2), chain(3)
    timeline = simulate(
        add_communication(interleaved(8, placement, 3), placement, *edges), placement, *edges
    )
    assert timeline.stage_peaks == rank_peaks(timeline) == (3, 2, 1)
    timeline = simulate(
        add_communication(simple(8, placement), placement, *edges), placement, *edges
    )
    assert timeline.stage_peaks == (8, 8, 8)


def test_a_rendezvous_holds_both_ranks_until_it_is_done():
    schedule = parse_schedule(
        """
        0F0 0SEND_F0>1 0F1 0SEND_F1>1
        1RECV_F0<0 1F0 1RECV_F1<0 1F1
        """
    )
    timeline = simulate(schedule, (0, 1), *ONE, Costs(forward=(1, 3), transfer=0.5))
    assert times(timeline, 0) == ["0F0 0-1", "0SEND_F0>1 1-1.5", "0F1 1.5-2.5", "0SEND_F1>1 4.5-5"]
    assert times(timeline, 1) == ["1RECV_F0<0 1-1.5", "1F0 1.5-4.5", "1RECV_F1<0 4.5-5", "1F1 5-8"]
    assert timeline.bubble == pytest.approx(1 - (2 + 6) / 16)


def test_a_buffered_message_travels_by_itself():
    schedule = parse_schedule(
        """
        0F0 0SEND_F0>1 0F1 0SEND_F1>1
        1RECV_F0<0 1F0 1RECV_F1<0 1F1
        """
    )
    costs = Costs(forward=(1, 3), transfer=0.5)
    timeline = simulate(schedule, (0, 1), *ONE, costs, rendezvous=False)
    assert times(timeline, 0) == ["0F0 0-1", "0SEND_F0>1 1-1", "0F1 1-2", "0SEND_F1>1 2-2"]
    assert times(timeline, 1) == [
        "1RECV_F0<0 0-0",
        "1F0 1.5-4.5",
        "1RECV_F1<0 4.5-4.5",
        "1F1 4.5-7.5",
    ]


def test_buffered_messages_of_a_link_travel_one_after_another():
    schedule = parse_schedule(
        """
        0F0 0SEND_F0>1 0SEND_F0>2
        1RECV_F0<0 2RECV_F0<0 1F0 2F0
        """
    )
    forward = {(0, 1), (0, 2)}
    timeline = simulate(schedule, (0, 1, 1), forward, (), Costs(transfer=2), rendezvous=False)
    assert times(timeline, 1)[2:] == ["1F0 3-4", "2F0 5-6"]


def test_a_compute_waits_for_the_latest_of_its_buffered_messages():
    schedule = parse_schedule("0F0 0SEND_F0>2\n1F0 1SEND_F0>2\n2RECV_F0<0 2RECV_F0<1 2F0")
    for slow in (0, 1):
        costs = Costs(transfer={(slow, 2): 3})
        timeline = simulate(schedule, (0, 1, 2), {(0, 2), (1, 2)}, (), costs, rendezvous=False)
        assert times(timeline, 2)[-1] == "2F0 4-5"


def test_costs_per_stage_and_edge():
    schedule = parse_schedule(
        """
        0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE
        1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE
        """
    )
    costs = Costs(
        forward=[1, 2], backward=[10, 20], transfer={(0, 1): 0.25, (1, 0): 0.5}, reduce=[100, 7]
    )
    timeline = simulate(schedule, (0, 1), *ONE, costs)
    assert times(timeline, 0) == [
        "0F0 0-1",
        "0SEND_F0>1 1-1.25",
        "0RECV_B0<1 23.25-23.75",
        "0B0 23.75-33.75",
        "0REDUCE 33.75-133.75",
    ]
    assert times(timeline, 1)[-1] == "1REDUCE 23.75-30.75"


def test_an_edge_without_a_cost_is_free():
    schedule = parse_schedule("0F0 0SEND_F0>1\n1RECV_F0<0 1F0")
    assert simulate(schedule, (0, 1), *ONE, Costs(transfer={(1, 0): 5})).makespan == 2


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=[1, 2, 3]), "forward has 3 costs for 2 stages"),
        (Costs(backward=-1), "BACKWARD of stage 0 costs -1; BACKWARD of stage 1 costs -1"),
        (Costs(transfer=float("nan")), "SEND_FORWARD of stage 0 costs nan"),
        (Costs(transfer={(0, 1): float("inf")}), "RECV_FORWARD of stage 1 costs inf"),
    ],
)
def test_costs_that_cannot_be_used(costs, message):
    with pytest.raises(ScheduleError, match=f"Costs cannot be used: .*{message}"):
        simulate(parse_schedule("0F0 0SEND_F0>1\n1RECV_F0<0 1F0"), (0, 1), *ONE, costs)


def test_a_schedule_that_needs_buffers_deadlocks_under_rendezvous():
    schedule = parse_schedule(EAGER_SENDS)
    assert simulate(schedule, (0, 1), *ONE, rendezvous=False).makespan == 6
    with pytest.raises(ScheduleError, match="Deadlock") as error:
        simulate(schedule, (0, 1), *ONE)
    assert str(error.value).splitlines() == [
        "Deadlock: rank 0 -> rank 1 -> rank 0 wait for each other. Let both ends meet their "
        "transfers in the same order, as add_communication does.",
        "  step    0           1           2    3               4           5    6           7",
        "  rank 0  0F0         0SEND_F0>1  0F1  >>0SEND_F1>1<<  0RECV_B0<1  0B0  0RECV_B1<1  0B1",
        "  rank 1  1RECV_F0<0  1F0         1B0  [1SEND_B0>0]    1RECV_F1<0  1F1  1B1         "
        "1SEND_B1>0",
        "rank 0 is blocked at step 3 in 0SEND_F1>1: waits for rank 1 to reach 1RECV_F1<0 "
        "(step 4 there; rank 1 is at step 3)",
        "rank 1 is blocked at step 3 in 1SEND_B0>0: waits for rank 0 to reach 0RECV_B0<1 "
        "(step 4 there; rank 0 is at step 3)",
    ]


def test_a_deadlock_that_no_buffer_helps():
    schedule = parse_schedule(
        """
        0F0 0SEND_F0>1 0RECV_B0<1 0B0 0F1 0SEND_F1>1 0RECV_B1<1 0B1
        1RECV_F0<0 1F0 1RECV_F1<0 1F1 1B0 1SEND_B0>0 1B1 1SEND_B1>0
        """
    )
    with pytest.raises(ScheduleError, match=r"in 1F1: waits for rank 0 to send 0SEND_F1>1"):
        simulate(schedule, (0, 1), *ONE, rendezvous=False)
    with pytest.raises(ScheduleError, match=r"in 1RECV_F1<0: waits for rank 0 to reach 0SEND_F1>1"):
        simulate(schedule, (0, 1), *ONE)


def test_a_deadlock_names_the_circle_and_those_who_wait_for_it():
    # Ranks 1 and 2 wait for each other; rank 0 waits for rank 2; rank 3 has finished.
    schedule = parse_schedule(
        """
        0F0 0SEND_F0>3
        1F0 1SEND_F0>4 5RECV_F0<2 5F0
        2F0 2SEND_F0>5 4RECV_F0<1 4F0 3RECV_F0<0 3F0
        6F0
        """
    )
    placement, forward = (0, 1, 2, 2, 2, 1, 3), {(0, 3), (1, 4), (2, 5)}
    with pytest.raises(ScheduleError, match="Deadlock: rank 1 -> rank 2 -> rank 1 wait") as error:
        simulate(schedule, placement, forward, ())
    text = str(error.value)
    assert ">>1SEND_F0>4<<" in text
    assert "rank 0 is blocked at step 1 in 0SEND_F0>3: waits for rank 2 to reach 3RECV_F0<0" in text
    assert text.endswith("finished: rank 3")


def test_messages_that_overtake_each_other():
    schedule = parse_schedule(
        """
        0F0 0F1 0SEND_F0>1 0SEND_F1>1
        1RECV_F1<0 1RECV_F0<0 1F0 1F1
        """
    )
    with pytest.raises(
        ScheduleError,
        match="Rank 1, step 0, 1RECV_F1<0: the next message from rank 0 is 0SEND_F0>1",
    ):
        simulate(schedule, (0, 1), *ONE, rendezvous=False)
    with pytest.raises(ScheduleError, match="Deadlock"):
        simulate(schedule, (0, 1), *ONE)


def test_values_and_gradients_are_separate_streams():
    # Rank 0 sends a value and then a gradient; rank 1 expects them the other way round.
    schedule = parse_schedule(
        """
        1RECV_F0<0 1F0 2F0 2B0 2SEND_F0>3 1B0 1SEND_B0>0
        0F0 0SEND_F0>1 0RECV_B0<1 3RECV_F0<2 3F0 3B0 0B0
        """
    )
    edges = {(0, 1), (2, 3)}, {(1, 0)}
    assert simulate(schedule, (1, 0, 0, 1), *edges, rendezvous=False).makespan > 0


def test_a_large_schedule_takes_seconds_to_generate_and_simulate():
    """Half a second here; on any machine, about as long per action as a small one."""
    num_ranks = 64
    placement, edges = tuple(range(num_ranks)), chain(num_ranks)
    took_s = []
    for num_microbatches in (128, 512):
        compute = interleaved(num_microbatches, placement, num_ranks)
        schedule = add_communication(compute, placement, *edges)
        started = time.process_time()
        timeline = simulate(schedule, placement, *edges)
        took_s.append(time.process_time() - started)
        assert timeline.makespan == 2 * (num_microbatches + num_ranks - 1)
        assert timeline.stage_peaks == tuple(range(num_ranks, 0, -1))
    assert took_s[1] < 10 * took_s[0], "four times the actions"
    assert took_s[1] < 60
