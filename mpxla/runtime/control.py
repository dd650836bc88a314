"""Short messages from the first rank of a pipeline to the others: which step runs next.

Unlike the user's `smp.send`, an announcement does not wait for its receivers.
"""

from collections.abc import Sequence
from typing import Any

from mpxla.comm.codec import DATA
from mpxla.comm.objects import Objects

__all__ = ["ControlChannel"]


class ControlChannel:
    """Announcements inside one pipeline."""

    def __init__(self, transport: Any, group: Sequence[int]):
        self._objects = Objects(transport, DATA._replace(channel="control"))
        self._first, *self._others = group

    def announce(self, message: Any) -> None:
        """Sends data to all other ranks of the pipeline. First rank only."""
        if self._others:
            self._objects.post(message, self._others, "announcement of a step")

    def follow(self) -> Any:
        """Waits for the first rank's next message. All other ranks."""
        return self._objects.take(self._first)
