"""Where a drawing goes: PNG by matplotlib, Chrome-trace JSON, or text, by the file's ending."""

import json
from pathlib import Path
from typing import Any

from mpxla.errors import MpxlaError
from mpxla.schedule.render import chrome_trace
from mpxla.schedule.timeline import Timeline

__all__ = ["import_pyplot", "save_timeline"]


def save_timeline(timeline: Timeline, path: Path, us_per_unit: float, title: str) -> None:
    """Writes a timeline to a file.

    Args:
        timeline: what to draw.
        path: ends in .png or .json.
        us_per_unit: microseconds per unit of time.
        title: above the picture.

    Raises:
        MpxlaError: another ending, or matplotlib is missing.
    """
    if path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(timeline, us_per_unit)))
    elif path.suffix == ".png":
        from mpxla.cli.picture import draw_timelines

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
