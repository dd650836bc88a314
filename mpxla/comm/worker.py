"""A thread that makes calls one after the other, in the order in which they come.

This file must not know what is called.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Worker"]


class Worker:
    """Makes calls in a daemon thread, which starts with the first one.

    Attributes:
        thread: None before the first call.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def put(self, call: Callable[[], object]) -> None:
        """Queues a call, which must not raise; returns at once."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self.thread.start()
        self._queue.put(call)

    def finish(self) -> None:
        """Lets the thread end after what is queued."""
        self._queue.put(None)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call()
            del call  # its tensors are not needed while the thread waits for the next one
