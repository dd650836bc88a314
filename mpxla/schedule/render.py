"""Timelines for people: a text grid, and a Chrome trace that ui.perfetto.dev opens.

    rank 0  0F0  0F1  0F2  .    .    0B0  .    0B1  .    0B2
    rank 1  .    1F0  1F1  .    1B0  1F2  1B1  .    1B2  .
    rank 2  .    .    2F0  2B0  2F1  2B1  2F2  2B2  .    .

Rendering returns a value and writes nothing. This module must not know whether a timeline was
simulated or measured.
"""

import math
from collections.abc import Iterator
from typing import Any

from mpxla.schedule.action import Action, Op
from mpxla.schedule.timeline import Span, Timeline

__all__ = ["chrome_trace", "render_text"]

_IDLE = "."
_GOES_ON = "="


def render_text(timeline: Timeline, max_columns: int = 120) -> str:
    """Draws a timeline with one line per rank and one column per unit of time.

    The unit is the shortest forward or backward, so that each one is visible, or longer where that
    would be too many columns.

    A cell shows what the rank does in the middle of the column: a forward or backward, ``=`` if it
    goes on from the column before, ``>`` or ``<`` during a transfer, or a dot.

    Returns:
        The grid, and a line with makespan, bubble and peaks below it.
    """
    computes = (
        s.end - s.start for spans in timeline.spans for s in spans if s.action.op.is_compute
    )
    shortest = min((duration for duration in computes if duration > 0), default=1.0)
    unit = max(shortest, timeline.makespan / max_columns)
    # A whole number of units may have been lost to rounding on the way.
    num_columns = math.ceil(timeline.makespan / unit - 1e-9)
    rows = [
        [f"rank {rank}", *_cells(spans, unit, num_columns)]
        for rank, spans in enumerate(timeline.spans)
    ]
    width = max((len(cell) for row in rows for cell in row[1:]), default=1)
    label = max((len(row[0]) for row in rows), default=0)
    lines = [
        "  ".join([row[0].ljust(label), *(cell.ljust(width) for cell in row[1:])]).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, _summary(timeline)])


def _cells(spans: tuple[Span, ...], unit: float, num_columns: int) -> Iterator[str]:
    """What a rank does in the middle of every column."""
    remaining = iter(spans)
    span = next(remaining, None)
    shown: Action | None = None
    for column in range(num_columns):
        middle = (column + 0.5) * unit
        while span is not None and span.end <= middle:
            span = next(remaining, None)
        if span is None or span.start > middle:
            yield _IDLE
        elif span.action == shown:
            yield _GOES_ON
        else:
            shown = span.action
            yield _label(shown)


def _label(action: Action) -> str:
    if action.op.is_transfer:
        return ">" if action.op.is_send else "<"
    return str(action)


def _summary(timeline: Timeline) -> str:
    peaks = " ".join(map(str, timeline.stage_peaks))
    return (
        f"makespan {timeline.makespan:g}, bubble {100 * timeline.bubble:.1f} %, "
        f"microbatches in flight per stage: {peaks}"
    )


def chrome_trace(timeline: Timeline, us_per_unit: float = 1000.0) -> dict[str, Any]:
    """Converts a timeline to the Trace Event Format of Chrome and Perfetto.

    Every rank is a thread; arrows lead from every send to the forward or backward that reads the
    message. `json.dump` the result to a file and open it in ui.perfetto.dev. A timeline in seconds
    has 1e6 `us_per_unit`.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "pipeline"}}
    ]
    for rank in range(len(timeline.spans)):
        common = {"ph": "M", "pid": 0, "tid": rank}
        events.append(common | {"name": "thread_name", "args": {"name": f"rank {rank}"}})
        events.append(common | {"name": "thread_sort_index", "args": {"sort_index": rank}})
    for rank, spans in enumerate(timeline.spans):
        events += (_slice(span, rank, us_per_unit) for span in spans)
    events += _arrows(timeline, us_per_unit)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(span: Span, rank: int, us_per_unit: float) -> dict[str, Any]:
    action = span.action
    details = {"stage": action.stage, "microbatch": action.microbatch, "peer": action.peer}
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.op.name.lower(),
        "pid": 0,
        "tid": rank,
        "ts": span.start * us_per_unit,
        "dur": (span.end - span.start) * us_per_unit,
        "args": {name: value for name, value in details.items() if value is not None},
    }


def _arrows(timeline: Timeline, us_per_unit: float) -> Iterator[dict[str, Any]]:
    """A start and a finish for every message that something reads."""
    computes = {
        span.action: (rank, span.start)
        for rank, spans in enumerate(timeline.spans)
        for span in spans
        if span.action.op.is_compute
    }
    number = 0
    for rank, spans in enumerate(timeline.spans):
        for action, start, _ in spans:
            if not action.op.is_send or action.peer is None:
                continue
            gradients = (Op.BACKWARD, Op.INPUT_GRADIENT)
            reads = (Op.FORWARD,) if action.op is Op.SEND_FORWARD else gradients
            keys = (Action(action.peer, op, action.microbatch) for op in reads)
            reader = next((computes[key] for key in keys if key in computes), None)
            if reader is None:
                continue
            number += 1
            common = {"cat": "message", "name": str(action), "id": number, "pid": 0}
            yield common | {"ph": "s", "tid": rank, "ts": start * us_per_unit}
            yield common | {
                "ph": "f",
                "bp": "e",
                "tid": reader[0],
                "ts": reader[1] * us_per_unit,
            }
