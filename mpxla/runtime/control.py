"""Short messages from the first rank of a pipeline to the others: which step runs next.

Unlike the user's `smp.send`, an announcement does not wait for its receivers.
"""

from collections.abc import Sequence
from typing import Any

from mpxla.comm.codec import DATA

__all__ = ["ControlChannel"]

_CHANNEL = "control"


class ControlChannel:
    """Announcements inside one pipeline.

    Args:
        transport: the session's transport.
        group: global ranks of the pipeline, by pp_rank.
    """

    def __init__(self, transport: Any, group: Sequence[int]):
        self._transport = transport
        self._first, *self._others = group

    def announce(self, message: Any) -> None:
        """Sends data to all other ranks of the pipeline. First rank only."""
        if self._others:
            data = DATA.dump(message, "announcement of a step")
            for rank in self._others:
                header = self._transport.seal.close(data, _CHANNEL, (rank,))
                self._transport.send([header, data], rank, _CHANNEL)

    def follow(self) -> Any:
        """Waits for the first rank's next message. All other ranks."""
        me = self._transport.rank
        sealed = self._transport.recv(None, self._first, _CHANNEL).result()
        data = self._transport.seal.open(sealed, _CHANNEL, self._first, (me,))
        return DATA.restore(data, self._first, me)
