"""Timelines: when every action of a schedule ran, simulated or measured, and what follows from it.

This module must not know where the times come from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from mpxla.schedule.action import Action, Op

__all__ = ["Span", "Timeline", "stage_peaks"]


class Span(NamedTuple):
    """When an action ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When everything ran, simulated or measured.

    Attributes:
        placement: pipeline rank of every stage.
        schedule: actions of every rank, in order.
        starts: when each action began.
        ends: when each action ended; not decreasing within a rank.
    """

    placement: tuple[int, ...]
    schedule: tuple[tuple[Action, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    makespan: float = field(init=False)
    """Time from the start to the last end."""
    rank_bubbles: tuple[float, ...] = field(init=False)
    """Per rank, the share of the makespan in which it runs no program."""
    bubble: float = field(init=False)
    """The same share over all ranks."""
    stage_peaks: tuple[int, ...] = field(init=False)
    """Per stage, the most microbatches between the start of their F and the end of their B or W.
    Without backwards nothing is kept, and a microbatch is in flight during its forward only."""
    rank_peaks: tuple[int, ...] = field(init=False)
    """Per rank, the most microbatches in flight at the same time, summed over its stages."""

    def __post_init__(self) -> None:
        makespan = max((ends[-1] for ends in self.ends if ends), default=0.0)
        trains = any(action.op.begins_backward for actions in self.schedule for action in actions)
        stage_peaks = [0] * len(self.placement)
        busy = [sum(self._compute_times(rank)) for rank in range(len(self.schedule))]
        idle = tuple(1.0 - time / makespan if makespan else 0.0 for time in busy)
        values = {
            "makespan": makespan,
            "rank_bubbles": idle,
            "bubble": sum(idle) / len(idle) if idle else 0.0,
            "rank_peaks": tuple(_peak(actions, stage_peaks, trains) for actions in self.schedule),
            "stage_peaks": tuple(stage_peaks),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Per rank, its actions in order with their times."""
        lists = zip(self.schedule, self.starts, self.ends, strict=True)
        return tuple(tuple(map(Span, *columns)) for columns in lists)

    def _compute_times(self, rank: int) -> Iterator[float]:
        columns = zip(self.schedule[rank], self.starts[rank], self.ends[rank], strict=True)
        return (end - start for action, start, end in columns if action.op.is_compute)


def stage_peaks(schedule: Sequence[Sequence[Action]], num_stages: int) -> tuple[int, ...]:
    """Per stage, the most microbatches in flight; needs no times, as a stage is on one rank."""
    peaks = [0] * num_stages
    trains = any(action.op.begins_backward for actions in schedule for action in actions)
    for actions in schedule:
        _peak(actions, peaks, trains)
    return tuple(peaks)


def _peak(actions: Sequence[Action], stage_peaks: list[int], trains: bool) -> int:
    """Most microbatches in flight on one rank; fills in the peaks of its stages."""
    forward = Op.FORWARD
    done = (Op.BACKWARD, Op.WEIGHT_GRADIENT) if trains else (Op.FORWARD,)
    live = [0] * len(stage_peaks)
    total = peak = 0
    for stage, op, _, _ in actions:
        if op is forward:
            live[stage] += 1
            total += 1
            if live[stage] > stage_peaks[stage]:
                stage_peaks[stage] = live[stage]
            if total > peak:
                peak = total
        if op in done:
            live[stage] -= 1
            total -= 1
    return peak
