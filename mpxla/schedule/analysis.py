"""What a timeline means: memory over time, bytes per link, and what the makespan hangs on.

Works on simulated and on measured timelines alike. This module must not know where costs come from.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mpxla.schedule.action import Action, Op
from mpxla.schedule.copies import offloads_done
from mpxla.schedule.dataflow import Dataflow, Edge
from mpxla.schedule.timeline import Span, Timeline

__all__ = ["StageBytes", "critical_path", "held_over_time", "link_bytes", "peak_bytes"]

_SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)


class StageBytes(NamedTuple):
    """What a stage holds of one microbatch, in bytes.

    Attributes:
        saved: what a forward keeps for its backward.
        kept: what the first part of a split backward keeps for the second.
        made: what of `kept` is not among the saved values.
        moved: what of `saved` an offload moves to the host.
    """

    saved: int = 0
    kept: int = 0
    made: int = 0
    moved: int = 0


def peak_bytes(
    schedule: Sequence[Sequence[Action]], stages: Sequence[StageBytes]
) -> tuple[int, ...]:
    """Most bytes of activations that every rank's device holds at a time.

    Args:
        schedule: actions of every rank.
        stages: what each stage holds.

    Returns:
        One number per rank.
    """
    return tuple(
        max((most for most, _ in held_over_time(actions, stages)), default=0)
        for actions in schedule
    )


def held_over_time(
    actions: Sequence[Action], stages: Sequence[StageBytes]
) -> Iterator[tuple[int, int]]:
    """Bytes of activations on a rank's device, action by action.

    Args:
        actions: of one rank.
        stages: what each stage of the pipeline holds.

    Yields:
        The most while an action runs, and what is held after it.
    """
    trains = any(action.op.begins_backward for action in actions)
    done = offloads_done(actions)
    held = 0
    for step, (stage, op, _, _) in enumerate(actions):
        held -= sum(stages[offload.stage].moved for offload in done.get(step, ()))
        one, most = stages[stage], held
        if op is Op.FORWARD and trains:
            held += one.saved
        elif op is Op.INPUT_GRADIENT:
            # What it reads and what it makes exist while the program runs.
            most = held + one.made
            held += one.kept - one.saved
        elif op is Op.WEIGHT_GRADIENT:
            held -= one.kept
        elif op is Op.BACKWARD:
            held -= one.saved
        elif op is Op.LOAD:
            held += one.moved
        yield max(most, held), held


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
