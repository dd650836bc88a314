"""Where the passes put transfers and reductions, by pictures, and that they overlap well."""

import pytest

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Op, format_schedule, parse_schedule
from mpxla.schedule.generate import forward_only, interleaved, simple
from mpxla.schedule.lower import add_communication, add_reduce
from mpxla.schedule.simulate import Costs, simulate

pytestmark = pytest.mark.unit


def chain(num_stages):
    """Edges between neighbours, forwards and backwards."""
    forward = {(stage, stage + 1) for stage in range(num_stages - 1)}
    return forward, {(target, source) for source, target in forward}


def assert_lowers(compute, placement, edges, expected):
    assert add_communication(compute, placement, *edges) == parse_schedule(expected)


def test_1f1b_receives_the_backward_before_it_sends_the_forward():
    assert_lowers(
        interleaved(3, (0, 1), 2),
        (0, 1),
        chain(2),
        """
        0F0 0SEND_F0>1 0F1 0RECV_B0<1 0SEND_F1>1 0B0 0F2 0RECV_B1<1 0SEND_F2>1 0B1 0RECV_B2<1 0B2
        1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1RECV_F2<0 1F2 1B2 1SEND_B2>0
        """,
    )


def test_the_last_stage_runs_its_first_backward_before_it_waits_for_the_next_forward():
    forward, backward = chain(3)
    last = add_communication(interleaved(4, (0, 1, 2), 3), (0, 1, 2), forward, backward)[2]
    assert format_schedule([last[:6]]) == "2RECV_F0<1 2F0 2B0 2SEND_B0>1 2RECV_F1<1 2F1"


def test_transfers_use_the_time_in_which_both_ends_are_idle():
    # Rank 0 sends F2 while rank 1 waits for its first backward, not when that backward is there.
    schedule = add_communication(interleaved(4, (0, 1, 2), 3), (0, 1, 2), *chain(3))
    assert format_schedule([schedule[1][4:10]]) == (
        "1F1 1RECV_F2<0 1RECV_B0<2 1SEND_F1>2 1B0 1SEND_B0>0"
    )


def test_fill_and_drain():
    assert_lowers(
        simple(2, (0, 1)),
        (0, 1),
        chain(2),
        """
        0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
        1RECV_F0<0 1F0 1RECV_F1<0 1F1 1B0 1SEND_B0>0 1B1 1SEND_B1>0
        """,
    )


def test_stages_of_one_rank_need_no_transfer():
    compute = interleaved(2, (0, 0, 0), 2)
    assert add_communication(compute, (0, 0, 0), *chain(3)) == compute


def test_a_skip_edge_and_an_edge_without_gradient():
    assert_lowers(
        interleaved(1, (0, 1, 2), 1),
        (0, 1, 2),
        ({(0, 1), (1, 2), (0, 2)}, {(2, 1), (1, 0)}),
        """
        0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<1 0B0
        1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0
        2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>1
        """,
    )


def test_evaluation_sends_no_gradients():
    assert_lowers(
        forward_only(2, (0, 1)),
        (0, 1),
        chain(2),
        """
        0F0 0SEND_F0>1 0F1 0SEND_F1>1
        1RECV_F0<0 1F0 1RECV_F1<0 1F1
        """,
    )


def test_a_chain_of_senders_goes_in_two_waves():
    # At each tick of the fill every rank sends to the next: 0 > 1 with 2 > 3, then 1 > 2. The
    # fourth microbatch then costs two transfers per tick, not one per rank.
    num_ranks, cost = 8, 0.1
    placement = tuple(range(num_ranks))
    schedule = add_communication(forward_only(8, placement), placement, *chain(num_ranks))
    timeline = simulate(schedule, placement, *chain(num_ranks), Costs(transfer=cost))
    assert timeline.makespan <= 15 + 2 * cost * 15


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8, 20])
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_rendezvous_costs_1f1b_nothing(num_ranks, num_microbatches, backward):
    placement, edges = tuple(range(num_ranks)), chain(num_ranks)
    schedule = add_communication(
        interleaved(num_microbatches, placement, num_ranks), placement, *edges
    )
    timeline = simulate(schedule, placement, *edges, Costs(backward=backward))
    assert timeline.makespan == (1 + backward) * (num_microbatches + num_ranks - 1)


# Makespan of 12 microbatches under rendezvous with backwards twice as long as forwards. A change
# that raises one of these makes pipelines slower; one that lowers it should lower it here. Looped
# stages pay for rendezvous: 75, 78 and 81 where messages do not hold ranks (test_patterns.py).
REGRESSIONS = {
    (0, 1, 0): 72,
    (0, 1, 0, 1): 90,
    (0, 1, 2, 1): 79,
    (0, 1, 1, 0): 86,
    (0, 0, 1): 78,
    (0, 1, 2, 0, 1, 2): 91,
    (0, 1, 2, 3, 0, 1, 2, 3): 94,
    (0, 1, 2, 3, 3, 2, 1, 0): 98,
}


@pytest.mark.parametrize(("placement", "makespan"), REGRESSIONS.items())
def test_makespan_of_several_stages_per_rank(placement, makespan):
    edges = chain(len(placement))
    schedule = add_communication(interleaved(12, placement, 14), placement, *edges)
    assert simulate(schedule, placement, *edges, Costs(backward=2)).makespan == makespan


def test_the_order_of_computes_is_kept():
    compute = interleaved(5, (0, 1, 2, 1), 3)
    lowered = add_communication(compute, (0, 1, 2, 1), *chain(4))
    assert [[a for a in actions if a.op.is_compute] for actions in lowered] == compute


def test_a_value_is_sent_before_its_ranks_next_compute():
    for placement in ((0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 2, 1)):
        for actions in add_communication(interleaved(6, placement, 6), placement, *chain(4)):
            latest = None
            for action in actions:
                if action.op.is_compute:
                    latest = action
                elif action.op.is_send:
                    op = Op.FORWARD if action.op is Op.SEND_FORWARD else Op.BACKWARD
                    assert latest == (action.stage, op, action.microbatch, None)


def test_reduction_follows_the_last_backward_and_its_sends():
    schedule = parse_schedule(
        """
        0F0 0F1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
        1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 2B0 1SEND_F9>3 2B1
        """
    )
    assert add_reduce(schedule) == parse_schedule(
        """
        0F0 0F1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0REDUCE
        1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1REDUCE 2B0 1SEND_F9>3 2B1 2REDUCE
        """
    )


def test_reduction_does_not_wait_for_sends_of_other_stages():
    schedule = parse_schedule(".\n1B0 1SEND_B0>0 2SEND_B0>0 2B1")
    assert (
        add_reduce(schedule)[1]
        == parse_schedule("1B0 1SEND_B0>0 1REDUCE 2SEND_B0>0 2B1 2REDUCE")[0]
    )


def test_evaluation_has_nothing_to_reduce():
    compute = forward_only(2, (0, 1))
    assert add_reduce(compute) == compute


def test_passes_leave_their_input_alone():
    compute = interleaved(2, (0, 1), 2)
    before = format_schedule(compute)
    add_reduce(add_communication(compute, (0, 1), *chain(2)))
    assert format_schedule(compute) == before


def test_lists_with_transfers_get_no_others():
    with pytest.raises(
        ScheduleError, match=r"Rank 0, step 1: 0SEND_F0>1 is not a forward or backward"
    ):
        add_communication(parse_schedule("0F0 0SEND_F0>1\n1F0"), (0, 1), *chain(2))


def test_order_that_cannot_run_shows_who_waits_for_what():
    compute = parse_schedule("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError, match="cannot run in their order") as error:
        add_communication(compute, (0, 1), *chain(2))
    assert str(error.value).splitlines()[1:] == [
        "  step    0    1        2    3",
        "  rank 0  0F0  >>0B0<<  0F1  0B1",
        "  rank 1  1F0  [1F1]    1B0  1B1",
        "rank 0 is blocked at step 1 in 0B0: waits for 1B0 (step 2 of rank 1)",
        "rank 1 is blocked at step 1 in 1F1: waits for 0F1 (step 2 of rank 0)",
    ]


def test_missing_producer_is_named():
    with pytest.raises(ScheduleError, match=r"in 1F0: waits for 0F0 \(which rank 0 lacks\)"):
        add_communication(parse_schedule("0F1\n1F0"), (0, 1), *chain(2))
