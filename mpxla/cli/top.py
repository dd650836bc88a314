"""`python -m mpxla top`: what all ranks of a running job do, on one page of the terminal.

It reads the files that ranks keep under the key `metrics_dir`, and so needs no connection to them.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpxla.errors import MpxlaError
from mpxla.tables import table

__all__ = ["add_parser", "rows"]

_TITLES = (
    *("rank", "host", "now", "steps", "s/step", "samples/s", "waiting", "memory", "sent"),
    *("programs", "compiled in"),
)
_SILENT_AFTER_S = 10.0


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "top",
        help="show all ranks of a running job on one page",
        description="Shows what every rank of a running job does. Start the job with the "
        'configuration key metrics_dir, as in MPXLA_CONFIG=\'{"metrics_dir": "FOLDER"}\'.',
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the job's metrics_dir")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Shows the table until it is interrupted, or once.

    Raises:
        MpxlaError: there are no files in the folder, or rich is missing.
    """
    if options.once:
        print("\n".join(table([_TITLES, *rows(options.folder, time.time())])))
        return
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise MpxlaError(
            "the page is drawn by rich, which is not installed. Install it with "
            "pip install 'mpxla[top]', or print one table with --once."
        ) from error
    try:
        page, console = _page(options.folder), Console()
        with Live(page, console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(options.interval)
                live.update(_page(options.folder), refresh=True)
    except KeyboardInterrupt:
        return


def _page(folder: Path) -> Any:
    from rich.table import Table

    page = Table(title=f"mpxla: {folder}, {time.strftime('%H:%M:%S')}", expand=True)
    for title in _TITLES:
        is_text = title in ("host", "now")
        page.add_column(title, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows(folder, time.time()):
        page.add_row(*row, style="dim" if row[2].startswith(("ended", "silent")) else None)
    return page


def rows(folder: Path, now: float) -> list[tuple[str, ...]]:
    """A row of texts for every rank, by rank.

    Args:
        folder: the job's metrics_dir.
        now: seconds since the epoch; a file that is much older belongs to a rank that is gone.

    Raises:
        MpxlaError: there are no files.
    """
    files = sorted(folder.glob("rank-*.json"))
    if not files:
        raise MpxlaError(
            f"{folder} has no files of ranks. Start the job with the configuration key "
            f'metrics_dir, as in MPXLA_CONFIG=\'{{"metrics_dir": "{folder}"}}\', and wait until '
            "its model is wrapped."
        )
    found: list[tuple[str, ...]] = []
    newest = json.loads(max(files, key=lambda path: path.stat().st_mtime).read_text())
    for path in files:
        values, age_s = json.loads(path.read_text()), now - path.stat().st_mtime
        if values["rank"] < newest["world_size"]:  # others are of an earlier, larger job
            found.append(_row(values, age_s))
    return found


def _row(values: Mapping[str, Any], age_s: float) -> tuple[str, ...]:
    state = values["state"]
    if state != "ended" and age_s > _SILENT_AFTER_S:
        state = f"silent for {age_s:.0f} s, last {state}"

    def number(name: str, form: str, scale: float = 1.0) -> str:
        value = values[name]
        return "-" if value is None else format(value * scale, form)

    cells: Sequence[str] = (
        str(values["rank"]),
        f"{values['host']}:{values['pid']}",
        state,
        str(values["steps"]),
        number("step_s", ".3g"),
        number("samples_per_s", ".4g"),
        number("waiting", ".0f", 100.0) + " %",
        number("memory_bytes", ".0f", 2**-20) + " MiB",
        number("bytes_sent", ".1f", 2**-20) + " MiB",
        str(values["compilations"]),
        number("compile_s", ".1f") + " s",
    )
    return tuple(cells)
