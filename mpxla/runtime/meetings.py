"""What the ranks of a pipeline, or all ranks, do together outside of steps.

The first rank of a pipeline announces it as it announces steps, so that all see who does something
else.
"""

from typing import Any

from mpxla.errors import RankMismatch
from mpxla.runtime.control import ControlChannel
from mpxla.runtime.sharded_calls import ShardedCalls
from mpxla.session import Session

__all__ = ["Meetings"]

_KIND = "meeting"
"""Kind of such an announcement."""


class Meetings:
    """Where ranks meet before they do something together.

    Args:
        session: topology and progress.
        control: announcements inside the pipeline.
        sharded: where the first ranks of pipelines compare calls.
    """

    def __init__(self, session: Session, control: ControlChannel, sharded: ShardedCalls):
        self._progress = session.progress
        self._rank = session.rank
        self._pp_rank = session.topology.pp_rank(session.rank)
        self._control = control
        self._sharded = sharded

    def pipeline(self, what: str, line: str) -> None:
        """Before something that the ranks of a pipeline do together.

        Args:
            what: the call, as in "model.state_dict()".
            line: the user's, as `at_user_line` gives it.

        Raises:
            RankMismatch: the first rank of the pipeline does something else.
        """
        if self._pp_rank == 0:
            self._control.announce((_KIND, what, line))
            return
        with self._progress.meeting(what):
            kind, announced, *rest = self._control.follow()
        if announced == what:
            return
        first = f"{announced}{rest[0]}" if kind == _KIND else f"the step function {announced}"
        raise self._apart(first, f"{what}{line}", what)

    def replicas(self, what: str, line: str) -> None:
        """The same for what all ranks do together, where replicas compare every step call.

        Args:
            what: the call.
            line: the user's.

        Raises:
            RankMismatch: another replica does something else.
        """
        if self._pp_rank == 0:
            self._sharded.compare(what, None, line)

    def check(self, message: Any, own: str) -> None:
        """Raises if the first rank has come to a meeting, while this one does something else."""
        kind, announced, *rest = message
        if kind == _KIND:
            raise self._apart(f"{announced}{rest[0]}", own, announced)

    def _apart(self, first: str, own: str, what: str) -> RankMismatch:
        return RankMismatch(
            f"pp_rank 0 called {first}, while rank {self._rank} (pp_rank {self._pp_rank}) called "
            f"{own}. All ranks of a pipeline have to call {what}, since each holds a part of the "
            f"model: call it outside of `if smp.rank() == 0:`, and use the result on one rank."
        )
