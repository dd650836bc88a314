"""The picture in a schedule's error: a rank x step grid with the failing cell marked.

Below the grid stands what every rank is doing and what it waits for, so that the cause can be read
off without running anything again. This module must not know what can go wrong.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpxla.schedule.action import Action
from mpxla.tables import table

__all__ = ["Cell", "format_failure"]

_MAX_COLUMNS = 10
_MAX_RANKS = 16


class Cell(NamedTuple):
    """A place in a schedule: the position `step` in the list of `rank`."""

    rank: int
    step: int


def format_failure(
    schedule: Sequence[Sequence[Action]],
    failing: Cell,
    headline: str,
    blocked: Mapping[Cell, str] | None = None,
) -> str:
    """Describes a failure: the headline says what happened and what to do.

    The cell to blame is marked ``>>2F0<<``, and those of blocked ranks, each with what it waits
    for, ``[2F0]``.

    Returns:
        The headline, the part of the grid around the failing cell, and one line per blocked rank.
    """
    blocked = blocked or {}
    lines = [headline, *_grid(schedule, failing, blocked)]
    lines += [
        f"rank {cell.rank} is blocked at step {cell.step} in "
        f"{schedule[cell.rank][cell.step]}: waits for {reason}"
        for cell, reason in sorted(blocked.items())
    ]
    if blocked:
        stuck = {cell.rank for cell in blocked}
        done = [str(rank) for rank in range(len(schedule)) if rank not in stuck]
        if done:
            lines.append(f"finished: rank {', '.join(done)}")
    return "\n".join(lines)


def _grid(
    schedule: Sequence[Sequence[Action]], failing: Cell, blocked: Mapping[Cell, str]
) -> list[str]:
    longest = max(map(len, schedule))
    # What is missing at the end of a list fails one step after it.
    steps = _window(failing.step, max(longest, failing.step + 1), _MAX_COLUMNS)
    ranks = _window(failing.rank, len(schedule), _MAX_RANKS)
    rows = [["step", *map(str, steps)]]
    for rank in ranks:
        actions = schedule[rank]
        row = [f"rank {rank}"]
        for step in steps:
            text = str(actions[step]) if step < len(actions) else ""
            if Cell(rank, step) == failing:
                text = f">>{text}<<"
            elif Cell(rank, step) in blocked:
                text = f"[{text}]"
            row.append(text)
        rows.append(row)
    lines = table(rows, is_left=True)
    if len(steps) < longest or len(ranks) < len(schedule):
        lines.append(f"  (of {longest} steps and {len(schedule)} ranks)")
    return lines


def _window(center: int, count: int, size: int) -> range:
    """At most `size` of `count` positions, with `center` among them."""
    begin = max(0, min(center - size // 2, count - size))
    return range(begin, min(count, begin + size))
