"""Short messages from the first rank of a pipeline to the others: the next step, call, or an error.

Unlike the user's `smp.send`, an announcement does not wait for its receivers.
"""

from collections.abc import Sequence
from typing import Any, cast

from mpxla.comm.codec import DATA
from mpxla.comm.objects import Objects
from mpxla.errors import MpxlaError, RankMismatch
from mpxla.session import Session

__all__ = ["AnnouncedError", "ControlChannel", "Meetings", "as_announced", "raise_announced"]

_MEETING = "meeting"
"""Kind of the announcement of a call that ranks make together outside of steps."""


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


class Meetings:
    """Where the ranks of a pipeline meet before they do something together outside of steps.

    The first rank of a pipeline announces it as it announces steps, so that all see who does
    something else.

    Args:
        session: topology and progress.
        control: announcements inside the pipeline.
    """

    def __init__(self, session: Session, control: ControlChannel):
        self._progress = session.progress
        self._rank = session.rank
        self._pp_rank = session.topology.pp_rank(session.rank)
        self._control = control

    def pipeline(self, what: str, line: str) -> None:
        """Before something that the ranks of a pipeline do together.

        Args:
            what: the call, as in "model.state_dict()".
            line: the user's, as `at_user_line` gives it.

        Raises:
            RankMismatch: the first rank of the pipeline does something else.
        """
        if self._pp_rank == 0:
            self._control.announce((_MEETING, what, line))
            return
        with self._progress.meeting(what):
            kind, announced, *rest = self._control.follow()
        if announced == what:
            return
        first = f"{announced}{rest[0]}" if kind == _MEETING else f"the step function {announced}"
        raise self._apart(first, f"{what}{line}", what)

    def check(self, message: Any, own: str) -> None:
        """Raises if the first rank has come to a meeting, while this one does something else."""
        kind, announced, *rest = message
        if kind == _MEETING:
            raise self._apart(f"{announced}{rest[0]}", own, announced)

    def _apart(self, first: str, own: str, what: str) -> RankMismatch:
        return RankMismatch(
            f"pp_rank 0 called {first}, while rank {self._rank} (pp_rank {self._pp_rank}) called "
            f"{own}. All ranks of a pipeline have to call {what}, since each holds a part of the "
            f"model: call it outside of `if smp.rank() == 0:`, and use the result on one rank."
        )
