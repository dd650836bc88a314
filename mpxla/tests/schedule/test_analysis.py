"""Memory, links and critical paths of timelines; the search among schedules."""

from collections.abc import Mapping
from itertools import pairwise

import pytest

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Action, parse_schedule
from mpxla.schedule.analysis import (
    StageBytes,
    held_over_time,
    link_bytes,
    peak_bytes,
)
from mpxla.schedule.dataflow import Dataflow
from mpxla.schedule.generate import generate
from mpxla.schedule.lower import add_communication
from mpxla.schedule.placement import place_stages
from mpxla.schedule.search import Candidate, StepCosts, candidates, search
from mpxla.schedule.simulate import Costs, simulate
from mpxla.schedule.timeline import Span, Timeline

pytestmark = pytest.mark.unit


def test_peak_bytes_follow_saved_and_kept_values():
    schedule = parse_schedule("0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1B0 1F1 1B1")
    whole = StageBytes(7, 0, 0)
    assert peak_bytes(schedule, [StageBytes(10, 4, 4), whole]) == (24, 7)
    assert peak_bytes(schedule, [StageBytes(10, 15, 15), whole]) == (40, 7), "both while I runs"
    assert peak_bytes(schedule, [StageBytes(10, 10, 0), whole]) == (20, 7), "nothing new"
    in_turn = parse_schedule("0F0 0I0 0W0 0F1 0I1 0W1")
    assert peak_bytes(in_turn, [StageBytes(10, 15, 15)]) == (25,)
    assert peak_bytes(parse_schedule("0F0 0F1"), [StageBytes(10)]) == (0,), "evaluation"


def test_bytes_over_time_follow_copies():
    (actions,) = parse_schedule("0F0 0OFFLOAD0 0F1 0F2 0F3 0LOAD0 0B3 0B0 0B1 0B2")
    held = list(held_over_time(actions, [StageBytes(10, moved=8)]))
    # The first forward after an offload hides it; the memory is free before the second.
    assert [after for _, after in held] == [10, 10, 20, 22, 32, 40, 30, 20, 10, 0]
    assert peak_bytes([actions], [StageBytes(10, moved=8)]) == (40,)


def test_link_bytes_add_up_over_microbatches():
    placement, edges, back = (0, 1, 0), {(0, 1), (1, 2), (0, 2)}, {(2, 1), (1, 0)}
    lists = generate("simple", 3, placement, 3, True)
    schedule = add_communication(lists, placement, edges, back)
    sizes = {(0, 1): 5, (1, 2): 7, (0, 2): 1000, (2, 1): 2, (1, 0): 1}
    assert link_bytes(schedule, placement, sizes) == {(0, 1): 3 * 7, (1, 0): 3 * 8}


def critical_path(timeline: Timeline, flow: Dataflow) -> list[tuple[int, Span]]:
    """A chain of actions without slack that ends last: speeding up anything else gains nothing.

    Goes back from the last end. Before an action stands what ended last of: the action before it on
    its rank, for a transfer that of its other end, for a forward or backward what it reads.

    Args:
        timeline: simulated or measured.
        flow: what reads what.

    Returns:
        (rank, span), from the first to the last; actions that take no time are left out.
    """
    place = {
        span.action: (rank, step)
        for rank, spans in enumerate(timeline.spans)
        for step, span in enumerate(spans)
    }
    ends = [(spans[-1].end, -rank) for rank, spans in enumerate(timeline.spans) if spans]
    if not ends:
        return []
    rank = -max(ends)[1]
    step = len(timeline.spans[rank]) - 1
    path: list[tuple[int, Span]] = []
    while True:
        span = timeline.spans[rank][step]
        if span.end > span.start:
            path.append((rank, span))
        before = _before(timeline, flow, place, rank, step)
        if before is None:
            return path[::-1]
        rank, step = before


def _before(
    timeline: Timeline,
    flow: Dataflow,
    place: Mapping[Action, tuple[int, int]],
    rank: int,
    step: int,
) -> tuple[int, int] | None:
    """What an action waited for last: (rank, step)."""
    span = timeline.spans[rank][step]
    action = span.action
    candidates = [(rank, step - 1)] if step else []
    if action.op.is_transfer:
        other = place.get(action.other_end())
        if other is not None and other[1]:
            candidates.append((other[0], other[1] - 1))
    elif action.op.is_compute:
        reads = flow.reads(action.op, action.stage)
        found = (place.get(Action(k.stage, k.op, action.microbatch)) for k in reads)
        candidates += [where for where in found if where is not None]
    ended = [(timeline.ends[r][s], r != rank, r, s) for r, s in candidates]
    earlier = [entry for entry in ended if entry[0] <= span.start + 1e-12 * timeline.makespan]
    if not earlier:
        return None
    _, _, r, s = max(earlier, key=lambda entry: entry[0])
    return r, s


@pytest.mark.parametrize("rendezvous", [True, False])
@pytest.mark.parametrize("pipeline", ["interleaved", "simple", "zero_bubble", "zero_bubble_v"])
def test_critical_path_explains_the_makespan(pipeline, rendezvous):
    placement = place_stages(pipeline, 3, 2 if pipeline == "zero_bubble_v" else 1)
    edges = {(s, s + 1) for s in range(len(placement) - 1)}
    back = {(t, s) for s, t in edges}
    schedule = add_communication(generate(pipeline, 6, placement, 6, True), placement, edges, back)
    costs = Costs(forward=1.0, backward=2.5, transfer=0.0)
    timeline = simulate(schedule, placement, edges, back, costs, rendezvous)
    flow = Dataflow.of_schedule(schedule, placement, edges, back)
    path = critical_path(timeline, flow)
    assert path[0][1].start == 0
    assert path[-1][1].end == timeline.makespan
    assert sum(span.end - span.start for _, span in path) == pytest.approx(timeline.makespan)
    for (_, one), (_, other) in pairwise(path):
        assert one.end == pytest.approx(other.start)


def test_critical_path_goes_through_the_slow_stage():
    placement, edges, back = (0, 1, 2), {(0, 1), (1, 2)}, {(1, 0), (2, 1)}
    schedule = add_communication(
        generate("interleaved", 8, placement, 3, True), placement, edges, back
    )
    timeline = simulate(schedule, placement, edges, back, Costs(forward=(1, 9, 1)), True)
    flow = Dataflow.of_schedule(schedule, placement, edges, back)
    slow = [span for rank, span in critical_path(timeline, flow) if rank == 1]
    assert sum(span.end - span.start for span in slow) > 0.8 * timeline.makespan


def guess(num_ranks):
    """Equal stages: 60 s a step on one device, 1000 bytes of parameters per rank."""

    def costs_of(candidate):
        num_stages = num_ranks * candidate.stages_per_rank
        forward = 20.0 / num_stages / candidate.num_microbatches
        edges = frozenset((stage, stage + 1) for stage in range(num_stages - 1))
        saved = 6400 // num_stages // candidate.num_microbatches
        held = [StageBytes(saved, saved, saved, saved)] * num_stages
        costs = Costs(forward=forward, backward=2 * forward)
        back = frozenset((b, a) for a, b in edges)
        return StepCosts(costs, edges, back, held, [1000] * num_ranks)

    return costs_of


def test_search_prefers_no_bubble_and_many_microbatches():
    found = search(4, candidates(4, (8, 16)), guess(4))
    assert (found[0].candidate.pipeline, found[0].candidate.num_microbatches) == (
        "zero_bubble_v",
        16,
    )
    assert found[0].step_s == pytest.approx(15 + 3 * 60 / 3 / 8 / 16)
    assert [f.step_s for f in found] == sorted(f.step_s for f in found)


def test_search_keeps_the_limit_of_memory():
    everything = search(4, candidates(4, (16,)), guess(4))
    limit = 1000 + 3 * 100  # three microbatches of activations on each rank
    found = search(4, candidates(4, (16,)), guess(4), limit)
    assert all(max(f.rank_bytes) <= limit for f in found)
    assert 0 < len(found) < len(everything)
    assert found[0].step_s > everything[0].step_s
    best = [f for f in everything if max(f.rank_bytes) <= limit]
    assert found == best, "nothing that fits is lost"


def test_search_says_what_comes_nearest():
    tried = [Candidate("simple", 1, 4, 4), Candidate("interleaved", 1, 4, 1)]
    with pytest.raises(
        ScheduleError,
        match=r"fits into 1200 bytes per rank: the least, interleaved, 1 per rank, 4 microbatches, "
        r"1 active, needs 1400\. Use more ranks",
    ):
        search(4, tried, guess(4), 1200)


@pytest.mark.slow
def test_sixty_four_stages_and_a_thousand_microbatches():
    placement = tuple(range(64))
    edges = [(s, s + 1) for s in range(63)]
    back = [(t, s) for s, t in edges]
    lists = generate("interleaved", 1024, placement, 64, True)
    schedule = add_communication(lists, placement, edges, back)
    timeline = simulate(schedule, placement, edges, back, Costs(backward=2))
    assert timeline.makespan == 3 * (1024 + 63)
    assert timeline.stage_peaks == tuple(range(64, 0, -1))
