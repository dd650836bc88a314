"""Keeps gloo from writing a line to standard output for every group that it connects.

gloo 0.5 (torch 2.9) writes `[Gloo] Rank 0 is connected to ...` by C++'s `std::cout`, which no
setting silences. So the file descriptor leads elsewhere for that moment; whatever else was written
there meanwhile is written again.
"""

import contextlib
import os
import sys
import tempfile
import threading
from typing import Any

__all__ = ["without_gloos_lines"]

_STDOUT = 1
_MARK = b"[Gloo] Rank "


def without_gloos_lines() -> contextlib.AbstractContextManager[None]:
    """While groups of gloo are made. Nothing is held back longer than that."""
    return _diversion


class _Diversion:
    """Leads standard output into a file, from the first thread that asks to the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._file: Any = None
        self._kept = -1

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if self._count > 1:
                return
            _flush()
            try:
                self._kept = os.dup(_STDOUT)
            except OSError:  # a process without standard output
                return
            self._file = tempfile.TemporaryFile()
            os.dup2(self._file.fileno(), _STDOUT)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count > 0 or self._file is None:
                return
            _flush()
            os.dup2(self._kept, _STDOUT)
            os.close(self._kept)
            with self._file as file:
                file.seek(0)
                rest = b"".join(line for line in file if not line.startswith(_MARK))
            self._file = None
            if rest:
                with contextlib.suppress(OSError):
                    os.write(_STDOUT, rest)


_diversion = _Diversion()


def _flush() -> None:
    """What Python holds back belongs to the side on which it was printed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.__stdout__.flush()  # type: ignore[union-attr]
