"""Timelines: when every action of a schedule ran, simulated or measured, and what follows from it.

This module must not know where the times come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpxla.schedule.action import Action, Op

__all__ = ["Span", "Timeline"]


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
        spans: per rank, its actions in order with their times.
    """

    placement: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    makespan: float = field(init=False)
    """Time from the start to the last end."""
    rank_bubbles: tuple[float, ...] = field(init=False)
    """Per rank, the share of the makespan in which it runs neither a forward nor a backward."""
    bubble: float = field(init=False)
    """The same share over all ranks."""
    stage_peaks: tuple[int, ...] = field(init=False)
    """Per stage, the most microbatches between the start of their F and the end of their B.
    Without backwards nothing is kept, and a microbatch is in flight during its forward only."""
    rank_peaks: tuple[int, ...] = field(init=False)
    """Per rank, the most microbatches in flight at the same time, summed over its stages."""

    def __post_init__(self) -> None:
        makespan = max((spans[-1].end for spans in self.spans if spans), default=0.0)
        trains = any(span.action.op is Op.BACKWARD for spans in self.spans for span in spans)
        stage_peaks = [0] * len(self.placement)
        measured = [_measure(spans, stage_peaks, trains) for spans in self.spans]
        idle = tuple(1.0 - busy / makespan if makespan else 0.0 for busy, _ in measured)
        values = {
            "makespan": makespan,
            "rank_bubbles": idle,
            "bubble": sum(idle) / len(idle) if idle else 0.0,
            "stage_peaks": tuple(stage_peaks),
            "rank_peaks": tuple(peak for _, peak in measured),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _measure(spans: Sequence[Span], stage_peaks: list[int], trains: bool) -> tuple[float, int]:
    """Busy time and peak of one rank; fills in the peaks of its stages."""
    forward, backward = Op.FORWARD, Op.BACKWARD
    live = [0] * len(stage_peaks)
    busy = 0.0
    total = peak = 0
    for (stage, op, _, _), start, end in spans:
        if op is forward:
            busy += end - start
            live[stage] += 1
            total += 1
            if live[stage] > stage_peaks[stage]:
                stage_peaks[stage] = live[stage]
            if total > peak:
                peak = total
            if trains:
                continue
        elif op is backward:
            busy += end - start
        else:
            continue
        live[stage] -= 1
        total -= 1
    return busy, peak
