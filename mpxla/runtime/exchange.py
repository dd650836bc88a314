"""Results of a step, from the ranks that compute them to all ranks of the pipeline.

A rank sends all its results in one packed message; receiving ranks wait for it only when a value
is looked at. All ranks of the pipeline take part.

Scripts keep losses for long and drop the logits beside them, so each result is held by itself: the
first look at a message divides it among those that somebody still holds.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from mpxla.comm.handle import Handle
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.plans.cut import CutStep

__all__ = ["Result", "exchange_results"]

Result: TypeAlias = Callable[[], list[torch.Tensor]]
"""Gives the tensors of one result, one per microbatch; may wait. Holds no other result, once some
result of its message was looked at."""


def exchange_results(
    cut: CutStep,
    results: Mapping[tuple[int, int], torch.Tensor],
    microbatches: Sequence[int],
    pp_rank: int,
    link: PipelineLink,
) -> dict[int, Result]:
    """Sends this rank's results, by (result index, microbatch), and expects those of the others."""
    shown = {p.result for p in cut.step.prints if p.check is None}  # where they are
    owned = ((i, stage.index) for stage in cut.stages for i in stage.results)
    owner = {i: cut.placement[s] for i, s in owned if i not in shown}
    specs = cut.result_specs()
    indices = {rank: [i for i in sorted(owner) if owner[i] == rank] for rank in set(owner.values())}
    found: dict[int, Result] = {}
    if pp_rank in indices:
        own = {i: [results[i, mb] for mb in microbatches] for i in indices[pp_rank]}
        packed = [value for values in own.values() for value in values]
        others = [rank for rank in range(cut.partition.num_ranks) if rank != pp_rank]
        deliveries = [link.send_to(rank, packed, "output") for rank in others]
        found.update((i, _OwnResult(values, deliveries)) for i, values in own.items())
    for rank in sorted(indices):
        if rank != pp_rank:
            wanted = [specs[i] for i in indices[rank] for _ in microbatches]
            message = _Message(link.receive_from(rank, wanted, "output"), len(microbatches))
            found.update((i, message.part()) for i in indices[rank])
    return found


class _OwnResult:
    """A result of this rank, which is on its way to the others."""

    def __init__(self, values: list[torch.Tensor], deliveries: Sequence[Handle[None]]):
        self._values, self._deliveries = values, deliveries

    def __call__(self) -> list[torch.Tensor]:
        for delivery in self._deliveries:  # the user may change in place what is still being sent
            delivery.result()
        return list(self._values)


class _Message:
    """All results of another rank, with `count` tensors each, until the first is looked at."""

    def __init__(self, wait: Callable[[], list[torch.Tensor]], count: int):
        self._wait, self._count = wait, count
        self._parts: list[weakref.ref[_ReceivedResult]] = []

    def part(self) -> "_ReceivedResult":
        """The result that comes next in the message."""
        part = _ReceivedResult(self)
        self._parts.append(weakref.ref(part))
        return part

    def divide(self) -> None:
        """Waits, and gives each result that is still held its tensors."""
        flat = iter(self._wait())
        for reference in self._parts:
            values = [next(flat) for _ in range(self._count)]
            part = reference()
            if part is not None:
                part.take(values)


class _ReceivedResult:
    """A result of another rank."""

    def __init__(self, message: _Message):
        self._message: _Message | None = message
        self._values: list[torch.Tensor] = []

    def __call__(self) -> list[torch.Tensor]:
        message = self._message
        if message is not None:
            message.divide()
        return list(self._values)

    def take(self, values: list[torch.Tensor]) -> None:
        """Holds its tensors, and the message no longer."""
        self._message, self._values = None, values
