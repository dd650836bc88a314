"""Where a drawing goes: PNG by matplotlib, Chrome-trace JSON, or text, by the file's ending.

In a picture there is one row per rank and one box per action, coloured by what it does: forwards
are blue, backwards green, input gradients teal, weight gradients orange; the shade tells the stages
of a rank apart, and the number is the microbatch. Waiting is white, so that bubbles are what the
eye sees first.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpxla.errors import MpxlaError
from mpxla.schedule.action import Op
from mpxla.schedule.render import chrome_trace
from mpxla.schedule.timeline import Span, Timeline

__all__ = ["draw_timelines", "import_pyplot", "save_timeline"]

_COLOURS = {
    Op.FORWARD: ("forward", "#3b75af", "#8fb5dd"),
    Op.BACKWARD: ("backward", "#3a8a4d", "#93cc9f"),
    Op.INPUT_GRADIENT: ("input gradients", "#1f8f8a", "#86cfcb"),
    Op.WEIGHT_GRADIENT: ("weight gradients", "#e08a28", "#f4c48d"),
    Op.REDUCE: ("reduction", "#8a5aa8", "#8a5aa8"),
}
_WAIT = "#d9534f"
_COPY = "#7f7f7f"
_ROW_INCHES = 0.55
_MEMORY_ROWS = 1.8
"""Height of the memory below a timeline, in rows of ranks."""
_WIDTH_INCHES = 14.0
_DOTS_PER_INCH = 130
_CHARACTER_INCHES = 0.075


def save_timeline(timeline: Timeline, path: Path, us_per_unit: float, title: str) -> None:
    """Writes a timeline, with a title, to a file whose ending is .png or .json.

    Raises:
        MpxlaError: another ending, or matplotlib is missing.
    """
    if path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(timeline, us_per_unit)))
    elif path.suffix == ".png":
        draw_timelines([(title, timeline)], path, us_per_unit)
    else:
        raise MpxlaError(
            f"{path}: drawings are written as .png (picture) or .json (for ui.perfetto.dev). "
            "Choose one of these endings."
        )


def import_pyplot() -> Any:
    """matplotlib's drawing functions, without a window.

    Raises:
        MpxlaError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MpxlaError(
            "drawing a PNG needs matplotlib, which is not installed. Install it with "
            "pip install 'mpxla[plot]', or write a .json file for ui.perfetto.dev."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_timelines(
    panels: Sequence[tuple[str, Timeline]],
    path: Path,
    us_per_unit: float = 1e6,
    memory: Sequence[Sequence[Sequence[tuple[float, int]]]] = (),
) -> None:
    """Draws timelines below each other on one time axis.

    Args:
        panels: (title, timeline) of every panel.
        path: PNG file to write.
        us_per_unit: microseconds per unit; the axis is in milliseconds if it is 1e6 (seconds).
        memory: per panel and rank, (time, bytes of saved activations from then on), which are drawn
            below the panel; none are by default.

    Raises:
        MpxlaError: matplotlib is not installed.
    """
    pyplot = import_pyplot()
    rows = [float(max(len(timeline.spans), 1)) for _, timeline in panels]
    if memory:
        rows = [part for count in rows for part in (count, _MEMORY_ROWS)]
    height = sum(rows) * _ROW_INCHES + 1.1 * len(rows) + 0.3
    figure, axes = pyplot.subplots(
        len(rows),
        1,
        figsize=(_WIDTH_INCHES, height),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": rows},
    )
    is_time = us_per_unit == 1e6
    scale = 1e3 if is_time else 1.0
    end = max((timeline.makespan for _, timeline in panels), default=0.0) * scale or 1.0
    each = 2 if memory else 1
    for axis, curves in zip(axes[1::2, 0], memory, strict=False):
        _draw_memory(axis, curves, scale)
    for axis, (title, timeline) in zip(axes[::each, 0], panels, strict=True):
        _draw(axis, timeline, scale, end)
        axis.set_title(f"{title}   (bubble {100 * timeline.bubble:.1f} %)", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("ms" if is_time else "units of time")
    used = {s.action.op for _, timeline in panels for spans in timeline.spans for s in spans}
    shown = [(name, dark) for op, (name, dark, _) in _COLOURS.items() if op in used]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for _, colour in shown]
    figure.legend(
        handles,
        [name for name, _ in shown],
        loc="upper right",
        ncol=max(len(shown), 1),
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    pyplot.close(figure)


def _draw(axis: Any, timeline: Timeline, scale: float, end: float) -> None:
    num_ranks = len(timeline.spans)
    for rank, spans in enumerate(timeline.spans):
        first_stage = min((s.action.stage for s in spans if s.action.op.is_compute), default=0)
        for span in spans:
            if span.end > span.start:
                _draw_span(axis, span, rank, first_stage, scale, end)
    axis.set_xlim(0, end)
    axis.set_ylim(num_ranks - 0.45, -0.55)
    axis.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axis.tick_params(labelsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_memory(axis: Any, curves: Sequence[Sequence[tuple[float, int]]], scale: float) -> None:
    """Bytes over time: a line per rank."""
    for rank, curve in enumerate(curves):
        times, sizes = [time * scale for time, _ in curve], [size / 1e6 for _, size in curve]
        axis.step(times, sizes, where="post", linewidth=1.2, label=f"rank {rank}")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("saved, MB", fontsize=8)
    axis.legend(loc="upper right", frameon=False, fontsize=7)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _draw_span(
    axis: Any, span: Span, rank: int, first_stage: int, scale: float, end: float
) -> None:
    action, start, width = span.action, span.start * scale, (span.end - span.start) * scale
    if action.op.is_transfer or action.op.is_copy:
        colour = _WAIT if action.op.is_transfer else _COPY
        axis.barh(rank, width, left=start, height=0.25, color=colour, alpha=0.7, linewidth=0)
        return
    _, dark, light = _COLOURS[action.op]
    colour = dark if action.stage == first_stage else light
    axis.barh(rank, width, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.6)
    text = "" if action.microbatch is None else str(action.microbatch)
    if text and width / end * (_WIDTH_INCHES - 1.2) > _CHARACTER_INCHES * len(text):
        ink = "white" if colour == dark else "black"
        axis.text(start + width / 2, rank, text, ha="center", va="center", fontsize=7, color=ink)
