"""What all models of a session have in common over replicas: one round of talk before a step.

In a step that ends in reductions, replicas tell each other what they are about to reduce, count it,
and inside `model.join()` find who has a batch. A step may reduce gradients of several models, but
replicas meet once. This file must not know what is reduced.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mpxla.comm.objects import Objects
from mpxla.comm.transport import Transport
from mpxla.comm.worker import Worker
from mpxla.parallel.accord import Accord
from mpxla.parallel.attendance import Attendance
from mpxla.parallel.join import Collective, Join

__all__ = ["Rounds"]


class Rounds:
    """The rounds of one rank of a group that reduces together.

    Attributes:
        attendance: counts rounds, and knows which replicas have left.
        hooks: the thread on which comm hooks run.
    """

    def __init__(self, transport: Transport, objects: Objects, group: Sequence[int]):
        self._transport = transport
        self._objects = objects
        self._group = tuple(group)
        self._accord = Accord(transport, group)
        self._join: Join | None = None
        self.attendance = Attendance(transport, group)
        self.hooks = Worker("mpxla-comm-hook")

    def meet(
        self,
        description: str,
        settings: str,
        exchanges: str,
        outline: Callable[[], Sequence[Collective]],
    ) -> int:
        """Called before every reduction: counts it, and inside `join` finds who takes part.

        Texts are those of `Accord.announce`; the outline has the collectives, in their order.

        Returns:
            Index of the replica whose buffers count.
        """
        self.attendance.count_step()
        if self._join is not None:
            return self._join.meet(description, outline())
        if len(self._group) > 1:
            self._accord.announce(description, settings, exchanges)
        return 0

    def is_same(self) -> bool:
        """Waits until all replicas have begun the step; whether they reduce the same.

        Raises:
            RankMismatch: optimizers have other settings, or one replica has had its last step.
        """
        return self._join is not None or self._accord.check(self.attendance.wait)

    def gather(self, own: Any) -> list[Any]:
        """What each replica has, by the order of the group; all call it at the end of a step."""
        return self._objects.allgather(own, self._group)

    @property
    def is_uneven(self) -> bool:
        """Whether replicas may run out of batches at different times."""
        return self._join is not None

    def begin_join(self) -> None:
        """From now on, replicas may run out of batches at different times."""
        self._join = Join(self._transport, self._objects, self._group, self.attendance)

    def end_join(self, is_orderly: bool) -> int | None:
        """This replica has no more batches: takes part in the others' steps until all are done.

        Args:
            is_orderly: whether the loop ended without an error; else nobody is waited for.

        Returns:
            Index of the replica whose values everyone has to take over; None if all did as much.
        """
        assert self._join is not None
        join, self._join = self._join, None
        return join.stay() if is_orderly else None
