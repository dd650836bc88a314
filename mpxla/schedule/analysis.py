"""What a schedule means: memory over time, and bytes per link.

This module must not know where costs come from.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mpxla.schedule.action import Action, Op
from mpxla.schedule.copies import offloads_done
from mpxla.schedule.dataflow import Edge

__all__ = ["StageBytes", "held_over_time", "link_bytes", "peak_bytes"]


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
    """Most bytes of activations that every rank's device holds at a time."""
    return tuple(
        max((most for most, _ in held_over_time(actions, stages)), default=0)
        for actions in schedule
    )


def held_over_time(
    actions: Sequence[Action], stages: Sequence[StageBytes]
) -> Iterator[tuple[int, int]]:
    """Bytes of activations on a rank's device, action by action.

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
    """Bytes that every link carries in one step, by those of a message on each edge of stages.

    Returns:
        (sending rank, receiving rank) -> bytes, in the order of links.
    """
    total: dict[tuple[int, int], int] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.op.is_send and action.peer is not None:
                link = rank, placement[action.peer]
                total[link] = total.get(link, 0) + num_bytes.get((action.stage, action.peer), 0)
    return dict(sorted(total.items()))
