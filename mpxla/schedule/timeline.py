"""Timelines: when every action of a schedule ran, simulated or measured, and what follows from it.

This module must not know where the times come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpxla.schedule.action import Action, Op, Schedule

__all__ = ["Span", "Timeline", "stage_peaks"]


class Span(NamedTuple):
    """When an action ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every action of every rank began and ended, simulated or measured.

    Ends do not decrease within a rank.
    """

    placement: tuple[int, ...]
    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """Time from the start to the last end."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """Share of the makespan in which ranks run no program, over all of them."""
        total = self.makespan * len(self.schedule)
        busy = sum(e - s for spans in self.spans for a, s, e in spans if a.op.is_compute)
        return 1.0 - busy / total if total else 0.0

    @cached_property
    def stage_peaks(self) -> tuple[int, ...]:
        """See `stage_peaks`."""
        return stage_peaks(self.schedule, len(self.placement))

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Per rank, its actions in order with their times."""
        lists = zip(self.schedule, self.starts, self.ends, strict=True)
        return tuple(tuple(map(Span, *columns)) for columns in lists)


def stage_peaks(schedule: Sequence[Sequence[Action]], num_stages: int) -> tuple[int, ...]:
    """Per stage, the most microbatches between the start of their F and the end of their B or W.

    Needs no times, as a stage is on one rank. Without backwards nothing is kept, and a microbatch
    is in flight during its forward only.
    """
    trains = any(action.op.begins_backward for actions in schedule for action in actions)
    done = (Op.BACKWARD, Op.WEIGHT_GRADIENT) if trains else (Op.FORWARD,)
    live, peaks = [0] * num_stages, [0] * num_stages
    for actions in schedule:
        for stage, op, _, _ in actions:
            if op is Op.FORWARD:
                live[stage] += 1
                peaks[stage] = max(peaks[stage], live[stage])
            if op in done:
                live[stage] -= 1
    return tuple(peaks)
