"""What a timeline means: memory over time, bytes per link, and what the makespan hangs on.

Works on simulated and on measured timelines alike. This module must not know where costs come from.
"""

from collections.abc import Mapping, Sequence

from mpxla.schedule.action import Action, Op
from mpxla.schedule.dataflow import Dataflow, Edge
from mpxla.schedule.timeline import Span, Timeline

__all__ = ["critical_path", "link_bytes", "peak_bytes"]

_SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)


def peak_bytes(
    schedule: Sequence[Sequence[Action]],
    saved_bytes: Sequence[int],
    kept_bytes: Sequence[int] | None = None,
    made_bytes: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Most bytes of activations that every rank holds at a time.

    Args:
        schedule: actions of every rank.
        saved_bytes: per stage, what a forward keeps for its backward, for one microbatch.
        kept_bytes: per stage, what the first part of a split backward keeps for the second; the
            same as `saved_bytes` by default.
        made_bytes: per stage, what of it is not among the saved values; all of it by default.

    Returns:
        One number per rank.
    """
    kept_bytes = saved_bytes if kept_bytes is None else kept_bytes
    made_bytes = kept_bytes if made_bytes is None else made_bytes
    peaks: list[int] = []
    for actions in schedule:
        trains = any(action.op.begins_backward for action in actions)
        held = peak = 0
        for stage, op, _, _ in actions:
            if op is Op.FORWARD and trains:
                held += saved_bytes[stage]
            elif op is Op.INPUT_GRADIENT:
                # What it reads and what it makes exist while the program runs.
                peak = max(peak, held + made_bytes[stage])
                held += kept_bytes[stage] - saved_bytes[stage]
            elif op is Op.WEIGHT_GRADIENT:
                held -= kept_bytes[stage]
            elif op is Op.BACKWARD:
                held -= saved_bytes[stage]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def link_bytes(
    schedule: Sequence[Sequence[Action]],
    placement: Sequence[int],
    num_bytes: Mapping[Edge, int],
) -> dict[tuple[int, int], int]:
    """Bytes that every link carries in one step.

    Args:
        schedule: actions of every rank.
        placement: pipeline rank of every stage.
        num_bytes: payload of one message by (source, destination) stage.

    Returns:
        (sending rank, receiving rank) -> bytes, in the order of links.
    """
    total: dict[tuple[int, int], int] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.op in _SENDS and action.peer is not None:
                link = rank, placement[action.peer]
                total[link] = total.get(link, 0) + num_bytes.get((action.stage, action.peer), 0)
    return dict(sorted(total.items()))


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
