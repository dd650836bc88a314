"""Short messages from the first rank of a pipeline to the others: the next step, or an error.

Unlike the user's `smp.send`, an announcement does not wait for its receivers.
"""

from collections.abc import Sequence
from typing import Any, cast

from mpxla.comm.codec import DATA
from mpxla.comm.objects import Objects
from mpxla.errors import MpxlaError

__all__ = ["AnnouncedError", "ControlChannel", "as_announced", "raise_announced"]


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


class AnnouncedError(MpxlaError):
    """Marks an error that all ranks of the pipeline raise; nobody has to be told."""


def as_announced(error: MpxlaError) -> MpxlaError:
    """The same error, of a class that also is `AnnouncedError`."""
    own = type(error)
    kind = cast(Any, type)(own.__name__, (own, AnnouncedError), {"__module__": "mpxla.errors"})
    return kind(*error.args)


def raise_announced(message: Sequence[Any]) -> None:
    """Raises the error that an announcement tells, if it does."""
    kind, _, *rest = message
    if kind == "error":
        error_type, text = rest
        raise as_announced(error_type(f"{text} (found on pp_rank 0)"))
