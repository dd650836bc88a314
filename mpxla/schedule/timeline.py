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
        ends = (span.end for spans in self.spans for span in spans)
        makespan = max(ends, default=0.0)
        busy = [sum(s.end - s.start for s in spans if s.action.op.is_compute) for spans in self.spans]
        share = [1.0 - time / makespan if makespan else 0.0 for time in busy]
        stage_peaks, rank_peaks = _peaks(self.spans, len(self.placement))
        values = {
            "makespan": makespan,
            "rank_bubbles": tuple(share),
            "bubble": sum(share) / len(share) if share else 0.0,
            "stage_peaks": stage_peaks,
            "rank_peaks": rank_peaks,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _peaks(
    spans: Sequence[Sequence[Span]], num_stages: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Most microbatches in flight, per stage and per rank."""
    keeps = any(span.action.op is Op.BACKWARD for actions in spans for span in actions)
    live = [0] * num_stages
    stage_peaks = [0] * num_stages
    rank_peaks: list[int] = []
    for actions in spans:
        total = peak = 0
        for (stage, op, _, _), _, _ in actions:
            if op is Op.FORWARD:
                live[stage] += 1
                total += 1
                stage_peaks[stage] = max(stage_peaks[stage], live[stage])
                peak = max(peak, total)
            if op is Op.BACKWARD or (op is Op.FORWARD and not keeps):
                live[stage] -= 1
                total -= 1
        rank_peaks.append(peak)
    return tuple(stage_peaks), tuple(rank_peaks)
