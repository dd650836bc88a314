"""The metrics of a rank in a file, for `python -m mpxla top` (the key `metrics_dir`).

A thread replaces the file once per second, so a reader always finds a whole one, and one that is
not replaced any more shows that the rank is gone. This module must not know who reads it.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpxla.log import get_logger

__all__ = ["MetricsFile"]

_PERIOD_S = 1.0


class MetricsFile:
    """Writes one rank's file until it is closed; on several hosts, the folder is shared.

    A thread calls `read`, which gives plain data.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, read: Callable[[], Any]):
        self._path = folder / f"rank-{rank:05d}.json"
        self._fixed = {
            "rank": rank,
            "world_size": world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._read = read
        self._stopped = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="mpxla-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes for the last time, that the rank has ended in order."""
        self._stopped.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._write({**self._read(), "state": "ended"})

    def _run(self) -> None:
        try:
            while True:
                self._write(self._read())
                if self._stopped.wait(_PERIOD_S):
                    return
        except OSError as error:  # a full disk must not end a training job
            get_logger().warning("metrics are not written any more: %s", error)

    def _write(self, values: dict[str, Any]) -> None:
        part = self._path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({**self._fixed, **values}))
        part.replace(self._path)
