"""A line now and then while a step function is compiled, which may take minutes.

A thread of its own writes it: the main thread is inside the compiler. This module must not know
what is compiled.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Sequence

__all__ = ["SignOfLife"]

_PAUSES_S = (10.0, 20.0, 60.0)
"""Until the first line, from it to the second, and so on; the last is repeated."""


class SignOfLife:
    """Says what a long work is doing.

    Ranks without `tell` are silent. There are pauses before each line; the last is repeated.

    Attributes:
        what: the work and its part, for other readers; empty where there is none.
    """

    def __init__(
        self, tell: Callable[[str], object] | None, pauses_s: Sequence[float] = _PAUSES_S
    ) -> None:
        self.what = ""
        self._tell = tell
        self._pauses_s = tuple(pauses_s)
        self._work = ""
        self._since = self._began = 0.0

    @contextlib.contextmanager
    def during(self, work: str, part: str) -> Generator[None]:
        """Around a work ("compiling step function train") and its first part; not nested."""
        stopped = threading.Event()
        self._work = work
        self.at(part)
        self._began = self._since
        if self._tell is not None:
            run = (self._tell, stopped)
            threading.Thread(target=self._run, args=run, name="mpxla-life", daemon=True).start()
        try:
            yield
        finally:
            stopped.set()
            self.what = ""

    def at(self, part: str) -> None:
        """The part of the work that begins now, as in "stage 1 backward"."""
        self.what, self._since = f"{self._work}: {part}", time.monotonic()

    def _run(self, tell: Callable[[str], object], stopped: threading.Event) -> None:
        *first, last = self._pauses_s
        for pause_s in itertools.chain(first, itertools.repeat(last)):
            if stopped.wait(pause_s):
                return
            now = time.monotonic()
            text = f"still {self.what} for {now - self._since:.0f} s"
            if self._since > self._began:
                text += f", {now - self._began:.0f} s in all"
            tell(text)
