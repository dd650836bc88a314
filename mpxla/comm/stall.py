"""What every rank is doing when nothing moves any more, as one table with the culprit named.

Every rank tells rank 0 regularly what it does and since when nothing has moved there (`pulse`).
Rank 0's lifeline server judges. It is a stall, which ends the job with the table,

- if nothing is heard of a rank for `stall_timeout_s`: its process is stopped, or its host is;
- if a rank has waited for others for so long, and none of those that it waits for, nor those that
  they wait for, has moved.

A rank that waits moves when its wait ends. One that does not wait moves while it computes or reads
or writes files (`vitals`), so a long evaluation or download is no stall, but a disk that does not
answer is.

This file knows no tensors, and actions only as texts.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from mpxla.comm.whereabouts import STEP, Place, Whereabouts
from mpxla.tables import table

__all__ = ["LEFT", "UNKNOWN", "Progress", "explain_stall"]

_TITLES = ("rank", "since", "now", "next", "waits for", "where")
_SILENT = "(silent)"
LEFT: dict[str, Any] = {
    "idle_s": float("inf"),
    "is_waiting": False,
    "is_running": False,
    "now": "has left",
    "next": "",
    "waits_for": [],
    "what": "",
    "call": "",
    "where": "its end",
}
"""The status of a rank that has ended in order."""
UNKNOWN: dict[str, Any] = {**LEFT, "now": "(not known here)", "where": ""}
"""The status of a rank of which only rank 0 knew more."""


class Progress:
    """What this process is doing; written by its main thread, read by the lifeline's.

    Attributes:
        is_running: whether a step's actions are being run, or the rank meets others.
        since: monotonic time of the last completed action, wait or part of a long work.
        function: name of the last step function that was called.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.since = time.monotonic()
        self.function = ""
        self._work = ""
        self._actions: Sequence[Any] = ()
        self._describe: Callable[[Any], str] = str
        self._index = 0
        self._whereabouts = Whereabouts(threading.main_thread())

    def begin(self, actions: Sequence[Any], describe: Callable[[Any], str]) -> None:
        """The step's actions begin; the table has them as `describe` writes them."""
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

    def move(self) -> None:
        """Something is complete."""
        self.since = time.monotonic()

    @contextlib.contextmanager
    def busy(self, what: str = "") -> Generator[None]:
        """Around a long work of this rank alone, for the table: `capture and compilation`."""
        self._work = what
        self.since = time.monotonic()
        try:
            yield
        finally:
            self._work = ""
            self.since = time.monotonic()

    @contextlib.contextmanager
    def meeting(self, what: str) -> Generator[None]:
        """While this lasts, other ranks have to come, as to the actions of a step."""
        self.begin([what], str)
        try:
            yield
        finally:
            self.end()

    def place(self) -> Place:
        """Where the main thread is, in the user's words."""
        call, line = self._whereabouts.find()
        return Place(f"the step function {self.function}" if call == STEP else call, line)

    def status(
        self, waits_for: Sequence[int], what: str, waits_since: float | None, moved: float
    ) -> dict[str, Any]:
        """A row of the table, as plain data.

        Of the wait it has the ranks and the communication, and when it began (None: there is none);
        times are monotonic. The process was last seen to make progress when it `moved`.
        """
        is_waiting = waits_since is not None
        place = self.place()
        since = max(moved, self.since) if waits_since is None else waits_since
        return {
            "idle_s": time.monotonic() - since,
            "is_waiting": is_waiting,
            "is_running": self.is_running,
            "now": self._now(place),
            "next": self._text(self._index + 1) if self.is_running else "",
            "waits_for": list(waits_for),
            "what": what,
            "call": place.call,
            "where": place.line,
        }

    def _now(self, place: Place) -> str:
        if self.is_running:
            return self._text(self._index)
        return ": ".join(filter(None, (place.call, self._work))) or "not in a step"

    def _text(self, index: int) -> str:
        actions = self._actions
        return self._describe(actions[index]) if index < len(actions) else "end of the step"


def explain_stall(
    statuses: Mapping[int, Mapping[str, Any]],
    world_size: int,
    timeout_s: float,
    silent: Mapping[int, Mapping[str, Any]] | None = None,
) -> tuple[int, str] | None:
    """Judges what ranks have told; those without a status are silent.

    `silent` has what those told last; `idle_s` is then the age of that.

    Returns:
        The rank to look at, and the error with the table; None if nothing is wrong.
    """
    last = silent or {}
    found = _silent_rank(statuses, world_size) or _stalled_rank(statuses, timeout_s)
    if found is None:
        return None
    rows = [_TITLES, *(_row(r, statuses.get(r), last.get(r)) for r in range(world_size))]
    headline = f"no action completed for {timeout_s:g} s (stall_timeout_s): {found[1]}"
    return found[0], "\n".join([headline, *table(rows, is_left=True), ""])


def _row(
    rank: int, status: Mapping[str, Any] | None, last: Mapping[str, Any] | None
) -> tuple[str, ...]:
    if status is None:
        since, where = (f"{last['idle_s']:.0f} s", f"last {last['where']}") if last else ("", "")
        return (str(rank), since, _SILENT, "", "", where)
    peers = ", ".join(map(str, status["waits_for"]))
    what = _place(status).waits_for(status["what"])
    waits = f"rank {peers}: {what}" if peers else what or "nobody"
    if what.startswith("rank "):
        waits = what
    since = "" if status["idle_s"] == float("inf") else f"{status['idle_s']:.0f} s"
    return (str(rank), since, status["now"], status["next"], waits, status["where"])


def _silent_rank(statuses: Mapping[int, Any], world_size: int) -> tuple[int, str] | None:
    silent = [rank for rank in range(world_size) if rank not in statuses]
    if not silent:
        return None
    named = ", ".join(map(str, silent))
    return silent[0], (
        f"rank {named} is silent: its process gives no sign of life, so it is stopped (SIGSTOP) or "
        f"its host does not answer"
    )


def _stalled_rank(
    statuses: Mapping[int, Mapping[str, Any]], timeout_s: float
) -> tuple[int, str] | None:
    """The rank that others wait for in vain."""
    for rank, status in sorted(statuses.items()):
        is_due = status["idle_s"] >= timeout_s and (status["is_waiting"] or status["is_running"])
        if is_due and all(
            statuses[other]["idle_s"] >= timeout_s for other in _needed(rank, statuses)
        ):
            return _culprit(rank, statuses)
    return None


def _needed(start: int, statuses: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Ranks that this one waits for, and those that they wait for, and so on."""
    found = [start]
    for rank in found:  # grows meanwhile
        found += [peer for peer in _peers(rank, statuses) if peer not in found]
    return found


def _peers(rank: int, statuses: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Ranks that one waits for: all others where it cannot tell."""
    status = statuses[rank]
    if status["waits_for"]:
        return [peer for peer in status["waits_for"] if peer in statuses]
    is_waiting = status["is_waiting"] or status["is_running"]
    return [peer for peer in statuses if peer != rank] if is_waiting else []


def _culprit(start: int, statuses: Mapping[int, Mapping[str, Any]]) -> tuple[int, str]:
    """A needed rank that waits for nobody, or else a circle."""
    for rank in sorted(_needed(start, statuses), key=lambda r: statuses[r]["is_running"]):
        if not statuses[rank]["is_waiting"]:
            place = statuses[rank]["where"]
            return rank, (
                f"rank {rank} waits for nobody and does not come; it is in {place}, where it "
                f"neither computes nor moves files"
            )
    seen: list[int] = []
    rank = start
    while rank not in seen:
        seen.append(rank)
        rank = _next(rank, statuses)
    circle = seen[seen.index(rank) :]
    text = " -> ".join(f"rank {member}" for member in (*circle, rank))
    return rank, f"{text} wait for each other{_apart(circle, statuses)}"


def _place(status: Mapping[str, Any]) -> Place:
    return Place(status.get("call", ""), status["where"])


def _apart(ranks: Sequence[int], statuses: Mapping[int, Mapping[str, Any]]) -> str:
    """What each of some ranks has called, if those are different things."""
    calls = {rank: _place(statuses[rank]) for rank in ranks}
    if not all(place.call for place in calls.values()) or len(set(calls.values())) == 1:
        return ""
    named = ", ".join(f"rank {rank} is in {place}" for rank, place in sorted(calls.items()))
    return f": {named}. Make the same calls on all of these ranks, in the same order"


def _next(rank: int, statuses: Mapping[int, Mapping[str, Any]]) -> int:
    """A rank that this one waits for; rather one that has not come to the same communication."""
    kind = statuses[rank]["what"].split(" ")[:2]
    peers = _peers(rank, statuses) or [rank]
    return next((p for p in peers if statuses[p]["what"].split(" ")[:2] != kind), peers[0])
