"""Ranks of a test that would all make the same value at once: one makes it, and the others read it.

What a step's trace is turned into and how a stage is lowered is kept on disk for later starts, see
`mpxla.kept`. The ranks of a world often come to the same value together. On the few cores of tests
that takes as long as making it one after the other, so here they wait for the first of them.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from mpxla import kept

__all__ = ["share_what_is_kept"]

_LONGEST_S = 20.0
"""Then a rank makes the value by itself: perhaps the one that makes it waits for this rank."""
_PAUSE_S = 0.005
_TOGETHER = ("decide", "measure")
"""What is called like this times something, on several ranks at once."""


def share_what_is_kept() -> None:
    """Has this process wait for what other ranks of its world make just now."""
    recall = kept.Kept.recall

    def recall_shared(
        self: kept.Kept, key: str | None, make: Callable[[], Any], *others: Callable[..., Any]
    ) -> Any:
        place = os.environ.get("MPXLA_RENDEZVOUS_FILE")  # of this world alone
        if key is None or self._folder is None or place is None or make.__name__ in _TOGETHER:
            return recall(self, key, make, *others)
        if (self._folder / (key + kept.SUFFIX)).exists():
            return recall(self, key, make, *others)
        with _alone(Path(place).with_name(f"{key}.lock")):
            return recall(self, key, make, *others)

    kept.Kept.recall = recall_shared


@contextlib.contextmanager
def _alone(path: Path) -> Generator[None]:
    """While one rank is in here, the others wait."""
    deadline = time.monotonic() + _LONGEST_S
    with path.open("w") as lock:
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_PAUSE_S)
        yield
