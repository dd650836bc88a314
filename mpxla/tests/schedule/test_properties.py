"""Generate, lower, simulate: for any pipeline the result is complete, safe and bounded."""

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpxla.schedule.action import Op, format_schedule, parse_schedule
from mpxla.schedule.generate import generate
from mpxla.schedule.lower import add_communication, add_reduce
from mpxla.schedule.simulate import Costs, simulate
from mpxla.tests.schedule.per_rank import rank_bubbles

pytestmark = pytest.mark.unit


@st.composite
def pipelines(draw):
    """A placement of 1..8 stages with any edges, and counts of microbatches."""
    num_stages = draw(st.integers(1, 8))
    num_ranks = draw(st.integers(1, num_stages))
    owners = st.integers(0, num_ranks - 1)
    placement = draw(
        st.one_of(
            st.just(tuple(range(num_stages))),
            st.just(tuple(stage % num_ranks for stage in range(num_stages))),
            st.tuples(*[owners] * num_stages),
        )
    )
    neighbours = {(stage, stage + 1) for stage in range(num_stages - 1)}
    pairs = [(u, v) for v in range(num_stages) for u in range(v)]
    extra = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    forward = extra | (neighbours if draw(st.booleans()) else set())
    without_gradient = draw(st.sets(st.sampled_from(sorted(forward)))) if forward else set()
    backward = {(v, u) for u, v in forward - without_gradient}
    return placement, forward, backward, draw(st.integers(1, 12)), draw(st.integers(1, 12))


NAMES = st.sampled_from(["interleaved", "eager_1f1b", "simple", "zero_bubble"])
COSTS = st.builds(
    Costs,
    forward=st.integers(1, 4),
    backward=st.integers(1, 4),
    transfer=st.sampled_from([0, 0.25, 1]),
    reduce=st.sampled_from([0, 2]),
)


@settings(max_examples=250, deadline=None)
@given(pipelines(), NAMES, st.booleans(), COSTS)
@example(((0, 1, 2, 0, 1, 2), set(), set(), 3, 3), "interleaved", True, Costs(1, 1, 0, 0))
def test_schedules_run_and_keep_their_bounds(pipeline, name, training, costs):
    placement, forward, backward, num_microbatches, active = pipeline
    num_stages = len(placement)
    compute = generate(name, num_microbatches, placement, active, training)
    schedule = add_reduce(add_communication(compute, placement, forward, backward))

    strict = simulate(schedule, placement, forward, backward, costs, rendezvous=True)
    loose = simulate(schedule, placement, forward, backward, costs, rendezvous=False)

    assert parse_schedule(format_schedule(schedule)) == schedule
    counts = Counter(action.op for actions in schedule for action in actions)
    crossing = [
        sum(placement[u] != placement[v] for u, v in edges) * num_microbatches
        for edges in (forward, backward)
    ]
    assert counts[Op.FORWARD] == num_stages * num_microbatches
    whole = [Op.BACKWARD] if name != "zero_bubble" else [Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT]
    for op in whole:
        assert counts[op] == num_stages * num_microbatches * training
    assert counts[Op.SEND_FORWARD] == counts[Op.RECV_FORWARD] == crossing[0]
    assert counts[Op.SEND_BACKWARD] == counts[Op.RECV_BACKWARD] == crossing[1] * training
    assert counts[Op.REDUCE] == num_stages * training

    # Looped stages run in Megatron's order where it fits, whose bound is that of the user alone.
    num_ranks = max(placement) + 1
    is_looped = placement == tuple(stage % num_ranks for stage in range(num_stages))
    is_lapped = is_looped and num_stages > num_ranks > 1 and num_microbatches % num_ranks == 0
    is_tight = name == "interleaved" and not (is_lapped and num_stages % num_ranks == 0)

    assert loose.stage_peaks == strict.stage_peaks
    for stage, peak in enumerate(strict.stage_peaks):
        bound = min(active, num_microbatches) if training else 1
        assert peak <= (min(bound, num_stages - stage) if is_tight else bound)


@settings(max_examples=100, deadline=None)
@given(pipelines(), NAMES)
def test_every_transfer_is_one_event_for_both_ranks(pipeline, name):
    placement, forward, backward, num_microbatches, active = pipeline
    compute = generate(name, num_microbatches, placement, active, training=True)
    schedule = add_communication(compute, placement, forward, backward)
    timeline = simulate(schedule, placement, forward, backward, Costs(transfer=0.5))
    spans = {span.action: span for rank in timeline.spans for span in rank}
    for action, start, end in spans.values():
        if action.op.is_transfer:
            assert spans[action.other_end()][1:] == (start, end)


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.data())
def test_results_do_not_depend_on_extra_ranks_without_stages(pipeline, data):
    placement, forward, backward, num_microbatches, active = pipeline
    compute = generate("interleaved", num_microbatches, placement, active, training=True)
    schedule = add_communication(compute, placement, forward, backward)
    idle = [[] for _ in range(data.draw(st.integers(0, 2)))]
    widened = simulate([*schedule, *idle], placement, forward, backward)
    assert widened.makespan == simulate(schedule, placement, forward, backward).makespan
    assert rank_bubbles(widened)[len(schedule) :] == (1.0,) * len(idle)
