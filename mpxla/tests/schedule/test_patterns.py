"""The known best orders against their published bubbles and peaks."""

import pytest

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Op, format_schedule, parse_schedule
from mpxla.schedule.generate import SCHEDULES, generate, interleaved, zero_bubble
from mpxla.schedule.lower import add_communication, add_reduce
from mpxla.schedule.placement import is_looped, is_v_shaped, place_stages
from mpxla.schedule.simulate import Costs, simulate
from mpxla.tests.schedule.per_rank import rank_peaks

pytestmark = pytest.mark.unit

UNIT = Costs(forward=1.0, backward=2.0)  # so that I and W take 1 each


def run(
    pipeline, num_ranks, num_microbatches, per_rank=1, active=1000, rendezvous=False, costs=UNIT
):
    """Timeline of a schedule over stages in a chain; by default messages do not hold ranks."""
    placement = place_stages(pipeline, num_ranks, per_rank)
    edges = [(s, s + 1) for s in range(len(placement) - 1)]
    back = [(t, s) for s, t in edges]
    lists = generate(pipeline, num_microbatches, placement, active, training=True)
    schedule = add_reduce(add_communication(lists, placement, edges, back))
    simulate(schedule, placement, edges, back, costs, rendezvous=True)
    return simulate(schedule, placement, edges, back, costs, rendezvous=rendezvous)


def waits(timeline):
    """Per rank, time without a program between its first and its last one."""
    found = []
    for spans in timeline.spans:
        computes = [span for span in spans if span.action.op.is_compute]
        busy = sum(span.end - span.start for span in computes)
        found.append(computes[-1].end - computes[0].start - busy)
    return found


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_bubbles_are_the_published_ones(p):
    for m in (p, 2 * p, 5 * p):
        one = run("interleaved", p, m)
        assert one.bubble == pytest.approx((p - 1) / (m + p - 1))
        for same in ("simple", "eager_1f1b"):
            assert run(same, p, m).bubble == pytest.approx((p - 1) / (m + p - 1))
        h1 = run("zero_bubble", p, m)
        assert h1.bubble == pytest.approx((p - 1) / (3 * m + p - 1))
        idle = [timeline.makespan - 3 * m for timeline in (one, h1)]
        assert idle[1] == pytest.approx(idle[0] / 3), "a third of the time that 1F1B waits"
        for v in (2, 3):
            looped = run("interleaved", p, m, per_rank=v)
            assert looped.bubble == pytest.approx((p - 1) / (m * v + p - 1))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_eager_1f1b_hides_transfers(p):
    """Only the first microbatch's way there and the last one's way back are waited for."""
    m, transfer = 4 * p, 0.25
    costs = Costs(forward=1.0, backward=2.0, transfer=transfer)
    eager, plain = (run(name, p, m, costs=costs) for name in ("eager_1f1b", "interleaved"))
    assert eager.makespan == pytest.approx(3 * (m + p - 1) + 2 * (p - 1) * transfer)
    assert plain.makespan > eager.makespan + (m - p) * transfer / 2


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_no_rank_waits_in_a_zero_bubble_v(p):
    for m in (2 * p, 2 * p + 1, 7 * p):
        timeline = run("zero_bubble_v", p, m, per_rank=2)
        assert waits(timeline) == pytest.approx([0.0] * p)
        assert timeline.makespan == pytest.approx(6 * m + p - 1), "ranks start one after another"


def test_peaks_are_the_promised_ones():
    for p in (2, 4, 8):
        m = 5 * p
        assert run("interleaved", p, m).stage_peaks == tuple(range(p, 0, -1))
        assert run("eager_1f1b", p, m).stage_peaks == tuple(range(2 * p - 1, 0, -2))
        assert run("zero_bubble", p, m).stage_peaks == (p,) * p
        v = run("zero_bubble_v", p, m, per_rank=2)
        assert rank_peaks(v) == (2 * p,) * p, "stages are half as large: the memory of p"
        looped = run("interleaved", p, m, per_rank=2)
        promised = [min(2 * (p - 1 - r) + p + 1, 2 * m) for r in range(p)]
        assert list(rank_peaks(looped)) == promised


@pytest.mark.parametrize("pipeline", SCHEDULES)
@pytest.mark.parametrize("per_rank", [1, 2, 3])
def test_active_microbatches_bound_every_stage(pipeline, per_rank):
    if pipeline == "zero_bubble_v" and per_rank != 2:
        with pytest.raises(ScheduleError, match="Set virtual_pipeline_degree to 2"):
            place_stages(pipeline, 2, per_rank)
        return
    for p in (1, 2, 4):
        for m in (1, p, 2 * p, 3 * p + 1):
            for active in (1, 2, p, 2 * p):
                timeline = run(pipeline, p, m, per_rank, active, rendezvous=True)
                assert max(timeline.stage_peaks) <= min(active, m)
                assert timeline.makespan >= 3 * m * per_rank


def test_zero_bubble_h1_reads_like_the_paper():
    assert zero_bubble(4, (0, 1), 9) == parse_schedule(
        """
        0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 .   0I3 0W3
        .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
        """
    )


def test_zero_bubble_v_reads_like_the_paper():
    assert zero_bubble(4, (0, 1, 1, 0), 9) == parse_schedule(
        """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 """
        """0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 """
        """1I3 1W2 2W3 1W3
        """
    )


def test_looped_1f1b_takes_turns_in_groups_of_as_many_microbatches_as_ranks():
    assert format_schedule(interleaved(4, (0, 1, 0, 1), 9)).splitlines() == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_other_counts_fall_back_to_a_list_schedule():
    assert interleaved(5, (0, 1, 0, 1), 9) != interleaved(4, (0, 1, 0, 1), 9)
    few = zero_bubble(3, (0, 1, 1, 0), 9)
    assert sorted(str(a) for a in few[0]) == sorted(
        f"{s}{op}{m}" for s in (0, 3) for op in "FIW" for m in range(3)
    )


def test_every_weight_gradient_follows_its_input_gradient():
    for actions in zero_bubble(9, (0, 1, 2, 2, 1, 0), 4):
        seen = set()
        for action in actions:
            if action.op is Op.WEIGHT_GRADIENT:
                assert (action.stage, Op.INPUT_GRADIENT, action.microbatch) in seen
            seen.add(action[:3])


def test_placements():
    assert place_stages("interleaved", 2, 2) == (0, 1, 0, 1)
    assert place_stages("zero_bubble_v", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert is_looped((0, 1, 2)) and is_looped((0, 1, 0, 1))
    assert not is_looped((0, 1, 0)) and not is_looped((0, 1, 1, 0))
    assert is_v_shaped((0, 1, 1, 0)) and not is_v_shaped((0, 1))
    with pytest.raises(ScheduleError, match="0 stages on each of 2 ranks cannot be placed"):
        place_stages("simple", 2, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0W0 0I0", r"(?s)it needs the input gradients of stage 0.*>>0W0<<"),
        ("0F0 0I0", "Rank 0 lacks 0W0"),
        ("0F0 0F1 0I0 0W0 0B1", "stage 0 splits other backwards into I and W. Write 0I1 and 0W1"),
        ("0F0 0W0", "stage 0 has no input gradients"),
        ("0F0 0I0 0REDUCE 0W0", "needs the weight gradients of stage 0"),
    ],
)
def test_split_backwards_that_do_not_fit(text, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(parse_schedule(text), (0,), (), ())


def test_costs_of_split_backwards():
    schedule = parse_schedule("0F0 0I0 0W0 1F0 1I0 1W0")
    costs = Costs(backward=(2.0, 4.0), input_gradient=(0.5, 1.0))
    spans = simulate(schedule, (0, 0), [(0, 1)], (), costs).spans[0]
    assert [span.end - span.start for span in spans] == [1.0, 0.5, 1.5, 1.0, 1.0, 3.0]
    halves = simulate(schedule, (0, 0), [(0, 1)], (), Costs(backward=3.0))
    assert [span.end - span.start for span in halves.spans[0]] == [1.0, 1.5, 1.5] * 2
