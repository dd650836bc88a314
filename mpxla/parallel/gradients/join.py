"""Uneven numbers of batches: replicas without any stay and take part in the others' reductions.

Before every reduction, the replicas that have a batch tell the collectives that follow; those that
do not take part with zeros, so that means are still over all replicas (torch's DDP, `Join`). When
nobody has a batch any more, everyone takes over the values of a replica that trained longest.

    replica 0   meet  reduce    meet  reduce    meet  reduce    stay ...  take over
    replica 1   meet  reduce    stay: meet, zeros     zeros          ...  take over
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from mpxla.comm.codec import register
from mpxla.comm.objects import Objects
from mpxla.comm.transport import Transport
from mpxla.errors import RankMismatch
from mpxla.stage.spec import TensorSpec

__all__ = ["Collective", "Join"]


@register
class Collective(NamedTuple):
    """What one rank of a group does together with the others."""

    kind: str
    """`all_reduce`, or `broadcast` from the first replica that has a batch."""
    shape: tuple[int, ...]
    """Of the tensor."""
    dtype: torch.dtype
    """Of the tensor."""


@register
class _Step(NamedTuple):
    """What a replica with a batch is about to reduce."""

    description: str
    outline: tuple[Collective, ...]


class Join:
    """One `with model.join():` on one rank of a group that reduces together.

    `count_step` is called for every reduction of others that this rank takes part in.
    """

    def __init__(
        self,
        transport: Transport,
        objects: Objects,
        group: Sequence[int],
        count_step: Callable[[], None],
    ):
        self._transport = transport
        self._objects = objects
        self._group = tuple(group)
        self._count_step = count_step
        self._num_steps = 0

    def meet(self, description: str, outline: Sequence[Collective]) -> int:
        """Before a reduction of this replica; all others meet as well, or stay.

        The description is equal on replicas that do the same; the outline is for those that stay.

        Returns:
            Index of the first replica that has a batch.

        Raises:
            RankMismatch: replicas reduce different things.
        """
        self._num_steps += 1
        own = _Step(description, tuple(outline))
        steps = self._exchange(own)
        active = [index for index, other in enumerate(steps) if isinstance(other, _Step)]
        for index in active:
            if steps[index] != own:
                raise RankMismatch(
                    f"rank {self._transport.rank} reduces {len(outline)} tensors in this step, and "
                    f"rank {self._group[index]} others. Call the same step functions in "
                    f"the same order on all replicas, inside model.join() too."
                )
        return active[0]

    def stay(self) -> int | None:
        """Takes part with zeros until no replica has a batch.

        Returns:
            Index of a replica that had most batches; None if all had as many.
        """
        while True:
            found = self._exchange(self._num_steps)
            for index, other in enumerate(found):
                if isinstance(other, _Step):
                    self._count_step()
                    self._take_part(other.outline, self._group[index])
                    break
            else:
                steps = [other for other in found if isinstance(other, int)]
                return None if min(steps) == max(steps) else steps.index(max(steps))

    def _take_part(self, outline: Sequence[Collective], source: int) -> None:
        transport, group = self._transport, self._group
        under_way = [
            transport.all_reduce(torch.zeros(one.shape, dtype=one.dtype), group)
            if one.kind == "all_reduce"
            else transport.broadcast(TensorSpec(one.shape, one.dtype), source, group)
            for one in outline
        ]
        for handle in under_way:
            handle.result()

    def _exchange(self, own: _Step | int) -> list[_Step | int]:
        """What every replica with a batch does, the number of steps of every other."""
        return self._objects.allgather(own, self._group)
