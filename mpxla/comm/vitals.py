"""Whether this process makes progress: it, or a process that it started, computes or moves files.

A thread that sleeps, or waits for a lock, a socket or a disk that does not answer, uses no
processor time. What the kernel counts per thread tells it from a long computation, a compilation
or a download, without asking the code that runs. Threads of communication libraries wake up many
times per second and use less than half a percent of a core, which is why there is a least rate.

This file knows nothing of ranks. It reads Linux's /proc; elsewhere only the processor time of the
whole process counts.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["LEAST_BYTES_PER_S", "LEAST_CPU_SHARE", "Vitals"]

LEAST_CPU_SHARE = 0.02
"""Of one core, by one thread or one child process."""
LEAST_BYTES_PER_S = 50e3
"""Read from or written to files, by the process and its children."""

_OWN_THREADS = "mpxla-lifeline"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class _Reading(NamedTuple):
    """What had been used at a time."""

    time_s: float
    cpu_s: dict[str, float]
    """By thread and child process."""
    num_bytes: dict[str, float]
    """By process."""


class Vitals:
    """Compares readings of the kernel's counters; used by one thread."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last: _Reading | None = None

    def forget(self) -> None:
        """The next sample begins anew."""
        self._last = None

    def sample(self) -> bool:
        """Whether there was progress since the last sample; the first one cannot tell."""
        before, self._last = self._last, self._read()
        if before is None:
            return False
        passed_s = self._last.time_s - before.time_s
        used = [s - before.cpu_s.get(key, 0.0) for key, s in self._last.cpu_s.items()]
        moved = [n - before.num_bytes.get(key, 0.0) for key, n in self._last.num_bytes.items()]
        is_computing = max(used, default=0.0) >= LEAST_CPU_SHARE * passed_s
        return is_computing or sum(moved) >= LEAST_BYTES_PER_S * passed_s

    def _read(self) -> _Reading:
        now = time.monotonic()
        own = self._proc / "self"
        if not own.exists():
            return _Reading(now, {"process": time.process_time()}, {})
        # What reads the counters must not count itself.
        ours = {t.native_id for t in threading.enumerate() if t.name.startswith(_OWN_THREADS)}
        cpu_s, num_bytes = {}, {}
        for thread in _entries(own / "task"):
            if int(thread.name) not in ours:
                cpu_s[f"thread {thread.name}"] = _thread_cpu_s(thread)
        watching = sum(_num_bytes(own / "task" / str(thread)) for thread in ours)
        num_bytes["self"] = _num_bytes(own) - watching
        for child in _descendants(self._proc, own):
            cpu_s[f"process {child.name}"] = _ticks(child)
            num_bytes[child.name] = _num_bytes(child)
        return _Reading(now, cpu_s, num_bytes)


def _entries(folder: Path) -> list[Path]:
    """What is in a folder that may vanish meanwhile, as threads and processes do."""
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended, or belongs to somebody else
        return ""


def _thread_cpu_s(thread: Path) -> float:
    schedule = _text(thread / "schedstat").split()
    return int(schedule[0]) / 1e9 if schedule else _ticks(thread)


def _ticks(task: Path) -> float:
    """User and system time of a process or thread, in steps of the kernel's clock."""
    fields = _text(task / "stat").rpartition(")")[2].split()  # the name may hold anything
    return (int(fields[11]) + int(fields[12])) * _TICK_S if len(fields) > 12 else 0.0


def _num_bytes(task: Path) -> float:
    """Bytes of read and write calls, and those of files that are mapped into memory."""
    total = 0
    for line in _text(task / "io").splitlines():
        name, _, number = line.partition(": ")
        if name in ("rchar", "wchar", "read_bytes", "write_bytes"):
            with contextlib.suppress(ValueError):
                total += int(number)
    return total


def _descendants(proc: Path, process: Path) -> Iterator[Path]:
    """The processes that a process has started, and theirs."""
    for thread in _entries(process / "task"):
        for child in _text(thread / "children").split():
            yield proc / child
            yield from _descendants(proc, proc / child)
