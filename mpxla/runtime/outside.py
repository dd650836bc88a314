"""Tensors outside of models that a script changes between calls, on some ranks of a pipeline only.

    for kept, own in zip(teacher.parameters(), model.parameters()):
        if not own.is_meta:                     # every rank averages its half
            kept.lerp_(own, 0.1)

Every rank has a teacher of its own, and the step reads all of it on one rank: half of that would
stay as it was. This module must not know where a tensor comes from.
"""

import zlib
from collections.abc import Collection, Mapping

import torch

from mpxla.comm.objects import Objects
from mpxla.comm.packing import as_bytes, as_memory
from mpxla.comm.transport import Group
from mpxla.errors import StepError
from mpxla.runtime.valueless import Valueless

__all__ = ["OutsideChanges"]

_FIRST_CALLS, _EVERY = 5, 16
"""Calls that compare: a script that changes something does so soon, and hashing takes time."""


class OutsideChanges:
    """Compares which tensors have changed on the ranks of a pipeline; all of them call it.

    Args:
        tensors: that a step reads on some rank, the same names on all ranks.
        read: names of those that this rank's programs read.
        objects: transport of the pipeline.
        group: its ranks.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        read: Collection[str],
        objects: Objects,
        group: Group,
    ) -> None:
        self._tensors = tensors if len(group) > 1 else {}
        self._read = frozenset(read)
        self._objects, self._group = objects, tuple(group)
        self._known: dict[str, int] = {}
        self._num_calls = 0

    def compare(self) -> None:
        """Called in every call, before programs read the tensors.

        Raises:
            StepError: a rank reads one that has changed on another rank only.
        """
        self._num_calls += 1
        if not self._tensors or (self._num_calls > _FIRST_CALLS and self._num_calls % _EVERY):
            return
        now = {
            name: zlib.crc32(as_memory(as_bytes(tensor.detach().cpu())))
            for name, tensor in self._tensors.items()
            if not (isinstance(tensor, Valueless) or tensor.is_meta or tensor.is_sparse)
        }
        before, self._known = self._known, now
        changed = {name for name in now.keys() & before.keys() if now[name] != before[name]}
        stale = (self._read & now.keys()) - changed
        found = self._objects.allgather((changed, stale), self._group)
        for name, tensor in self._tensors.items():
            changing = [r for r, (c, _) in zip(self._group, found, strict=True) if name in c]
            reading = [r for r, (_, s) in zip(self._group, found, strict=True) if name in s]
            if changing and reading:
                raise StepError(
                    f"the step function reads a tensor of shape {list(tensor.shape)} outside of "
                    f"its models ({name}), which has changed between calls on the ranks "
                    f"{changing}, and not on {reading}, where it is read. Every rank has one of "
                    f"its own: write to it alike on all of them, with whole parameters in a block "
                    f"of model.summon_full_params(); or give a teacher a DistributedModel of its "
                    f"own, which lives where its student does."
                )
