"""What every rank is doing when nothing moves any more, as one table with the culprit named.

A rank that waits for `stall_timeout_s` inside a step, or for others to save or load with it, asks
rank 0's lifeline server, which asks all ranks. The threads that watch the lifelines answer, also
where the main thread is stuck. If some rank has completed an action meanwhile, nothing is wrong;
otherwise the table becomes the job's failure.

This file knows no tensors, and actions only as texts.
"""

import contextlib
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["LEFT", "Progress", "explain_stall"]

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = (
    _PACKAGE,
    "<",
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
)
_TITLES = ("rank", "since", "now", "next", "waits for", "where")
_SILENT = "(silent: no answer)"
LEFT: dict[str, Any] = {
    "idle_s": float("inf"),
    "now": "has left",
    "next": "",
    "waits_for": [],
    "what": "",
    "where": "its end",
}
"""The status of a rank that has ended in order."""


class Progress:
    """What this process is doing; written by its main thread, read by the lifeline's.

    Attributes:
        is_running: whether a step's actions are being run.
        is_busy: whether it does something that takes as long as it takes (compiling).
        since: monotonic time of the last completed action, or of the begin of the step.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.is_busy = False
        self.since = time.monotonic()
        self._actions: Sequence[Any] = ()
        self._describe: Callable[[Any], str] = str
        self._index = 0
        self._owner = threading.main_thread()

    def begin(self, actions: Sequence[Any], describe: Callable[[Any], str]) -> None:
        """The step's actions begin.

        Args:
            actions: what will run, in order.
            describe: writes an action for the table, with its peer and shape.
        """
        self._actions, self._describe, self._index = actions, describe, 0
        self.since = time.monotonic()
        self.is_running = True

    def at(self, index: int) -> None:
        """The actions before this one are complete."""
        self._index = index
        self.since = time.monotonic()

    def end(self) -> None:
        """The step's actions are done."""
        self._index = len(self._actions)
        self.since = time.monotonic()
        self.is_running = False

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        """While this lasts, the rank counts as moving, whatever time it takes."""
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False
            self.since = time.monotonic()

    @contextlib.contextmanager
    def meeting(self, what: str) -> Generator[None]:
        """While this lasts, other ranks have to come, as to the actions of a step.

        Args:
            what: for the table.
        """
        self.begin([what], str)
        try:
            yield
        finally:
            self.end()

    def status(self, waits_for: Sequence[int], what: str) -> dict[str, Any]:
        """A row of the table, as plain data.

        Args:
            waits_for: ranks that the main thread waits for.
            what: the communication that it waits for.
        """
        idle_s = 0.0 if self.is_busy else time.monotonic() - self.since
        return {
            "idle_s": idle_s,
            "now": self._text(self._index) if self.is_running else "not in a step",
            "next": self._text(self._index + 1) if self.is_running else "",
            "waits_for": list(waits_for),
            "what": what,
            "where": self._where(),
        }

    def _text(self, index: int) -> str:
        actions = self._actions
        return self._describe(actions[index]) if index < len(actions) else "end of the step"

    def _where(self) -> str:
        """The user's line that the main thread is in, or the innermost one."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        frame = frames.get(self._owner.ident or 0)
        lines = traceback.extract_stack(frame) if frame is not None else []
        own = [line for line in lines if _is_users(line.filename)]
        shown = (own or list(lines))[-1:]
        return f"{Path(shown[0].filename).name}:{shown[0].lineno} {shown[0].name}" if shown else ""


def _is_users(filename: str) -> bool:
    """Whether a file belongs to the script; mpxla's own tests play that part as well."""
    return not filename.startswith(_LIBRARIES) or filename.startswith(f"{_PACKAGE}/tests/")


def explain_stall(
    statuses: Mapping[int, Mapping[str, Any]], world_size: int, timeout_s: float
) -> tuple[int, str] | None:
    """Judges what ranks answered.

    Args:
        statuses: answers by rank; ranks that are missing were silent.
        world_size: number of ranks.
        timeout_s: how long nothing may complete.

    Returns:
        The rank to look at, and the error with the table; None if something moved.
    """
    if any(status["idle_s"] < timeout_s for status in statuses.values()):
        return None
    culprit, reason = _culprit(statuses, world_size)
    rows = [_TITLES, *(_row(rank, statuses.get(rank)) for rank in range(world_size))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    headline = f"no action completed for {timeout_s:g} s (stall_timeout_s): {reason}"
    return culprit, "\n".join([headline, *table, ""])


def _row(rank: int, status: Mapping[str, Any] | None) -> tuple[str, ...]:
    if status is None:
        return (str(rank), "", _SILENT, "", "", "")
    peers = ", ".join(map(str, status["waits_for"]))
    waits = f"rank {peers}: {status['what']}" if peers else "nobody"
    since = f"{status['idle_s']:.0f} s"
    return (str(rank), since, status["now"], status["next"], waits, status["where"])


def _culprit(statuses: Mapping[int, Mapping[str, Any]], world_size: int) -> tuple[int, str]:
    """Follows who waits for whom to a circle, or to a rank that waits for nobody."""
    silent = [rank for rank in range(world_size) if rank not in statuses]
    if silent:
        named = ", ".join(map(str, silent))
        return silent[0], f"rank {named} is silent: its process does not answer"
    starts = sorted(rank for rank, status in statuses.items() if status["waits_for"])
    seen: list[int] = []
    rank = starts[0] if starts else min(statuses)
    while rank not in seen:
        seen.append(rank)
        if not statuses[rank]["waits_for"]:
            place = statuses[rank]["where"]
            return rank, f"rank {rank} waits for nobody and does not come; it is in {place}"
        rank = statuses[rank]["waits_for"][0]
    circle = [*seen[seen.index(rank) :], rank]
    return rank, f"{' -> '.join(f'rank {member}' for member in circle)} wait for each other"
