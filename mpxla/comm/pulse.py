"""The sign of life that a rank gives rank 0, with what it is doing, and the one it expects back.

A thread of its own sends it, wherever the main thread is. A process that is stopped sends none,
which is how a rank that is stopped differs from one that computes for long.

    every rank  --beat: a row of the table-->  rank 0's lifeline server, which judges them (`stall`)
                <--pulse: the rows of all----

Should rank 0 itself fall silent, every rank ends by its own watch, with the rows that it knows.

This file knows no sockets: the lifeline gives it what to call.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mpxla.comm.handle import Failure, Wait
from mpxla.comm.stall import UNKNOWN, Progress, explain_stall
from mpxla.comm.vitals import Vitals

__all__ = ["Absence", "Pulse", "beat_interval_s", "longest_silence_s"]

_LONGEST_INTERVAL_S = 2.0
_SHORTEST_INTERVAL_S = 0.1
_PER_TIMEOUT = 8
_LEAST_SILENCE_S = 5.0
_LONGEST_GAP_S = 5.0


def beat_interval_s(stall_timeout_s: float) -> float:
    """How often ranks give a sign of life."""
    wanted_s = stall_timeout_s / _PER_TIMEOUT
    return min(max(wanted_s, _SHORTEST_INTERVAL_S), _LONGEST_INTERVAL_S)


def longest_silence_s(stall_timeout_s: float) -> float:
    """After which silence a process counts as stopped; a busy machine may delay a beat."""
    return max(stall_timeout_s, _LEAST_SILENCE_S)


class Absence:
    """Notices that this process itself was stopped, with its machine or by a debugger.

    What others said meanwhile is yet to be read, so times before that prove nothing.
    """

    def __init__(self) -> None:
        self._seen = time.monotonic()
        self.until = self._seen
        """When it came back the last time."""

    def look(self) -> float:
        """To be called more often than `_LONGEST_GAP_S`; returns the time."""
        now = time.monotonic()
        if now - self._seen > _LONGEST_GAP_S:
            self.until = now
        self._seen = now
        return now


class Pulse:
    """The thread that beats, from construction on until `stop`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        progress: Progress,
        current_wait: Callable[[], Wait | None],
        stall_timeout_s: float,
        tell: Callable[[Mapping[str, Any]], Any],
        fail: Callable[[Failure], Any],
    ) -> None:
        """Starts it.

        `tell` sends a row to rank 0; `fail` is told when rank 0 is silent, or this thread cannot go
        on.
        """
        self._rank, self._world_size = rank, world_size
        self._progress, self._current_wait = progress, current_wait
        self._timeout_s = stall_timeout_s
        self._tell, self._fail = tell, fail
        self._vitals = Vitals()
        self._absence = Absence()
        self._moved = self._heard = time.monotonic()
        self.rows: Mapping[int, Mapping[str, Any]] = {}
        """What other ranks have told; empty in a large world."""
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="mpxla-lifeline-pulse", daemon=True).start()

    def hear(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes in rank 0's sign of life: what the ranks do, or nothing in a large world."""
        self._heard = time.monotonic()
        self.rows = {int(rank): row for rank, row in rows.items()}

    def stop(self) -> None:
        """Ends the thread soon."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(beat_interval_s(self._timeout_s)):
                self._beat()
        except Exception as error:  # nobody would notice a rank that is stopped any more
            text = f"rank {self._rank} cannot give signs of life: {type(error).__name__}: {error}"
            self._fail(Failure(self._rank, text))

    def _beat(self) -> None:
        now, wait = self._absence.look(), self._current_wait()
        self._look_for_progress(now, wait)
        row = self._row(now, wait)
        self._tell(row)
        if now - max(self._heard, self._absence.until) >= longest_silence_s(self._timeout_s):
            self._fail(self._silence_of_rank_0(now, row))
            self._stopped.set()

    def _look_for_progress(self, now: float, wait: Wait | None) -> None:
        """Reads the kernel's counters, which costs a little, only where they are needed."""
        last = max(self._moved, self._progress.since, self._absence.until)
        if wait is not None or now - last < self._timeout_s / 4:
            self._vitals.forget()
        elif self._vitals.sample():
            self._moved = now

    def _row(self, now: float, wait: Wait | None) -> dict[str, Any]:
        peers, what, since = wait if wait is not None else ((), "", None)
        row = self._progress.status(peers, what, since, self._moved)
        row["idle_s"] = min(row["idle_s"], now - self._absence.until)
        return row

    def _silence_of_rank_0(self, now: float, own: Mapping[str, Any]) -> Failure:
        age_s = now - self._heard
        last = {0: {**self.rows.get(0, {"where": "unknown"}), "idle_s": age_s}}
        known = {rank: self.rows.get(rank, UNKNOWN) for rank in range(1, self._world_size)}
        known[self._rank] = own
        found = explain_stall(known, self._world_size, self._timeout_s, silent=last)
        assert found is not None, "rank 0 is not among those that are heard of"
        return Failure(0, found[1])
