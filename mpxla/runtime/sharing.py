"""How the ranks of a tensor-parallel group agree on a call of a step function.

All of them are given the same batch and compute with the same random numbers, except where their
shards differ. Each would go on with another batch without noticing, and what is equal on all of
them would drift apart; so they compare digests before every call.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from mpxla.comm.objects import Objects
from mpxla.comm.packing import as_memory
from mpxla.comm.transport import Group
from mpxla.device.backend import Backend
from mpxla.errors import RankMismatch

__all__ = ["Sharing"]


class Sharing:
    """The first pipeline ranks that share the tensors of their partition.

    Args:
        objects: the session's object communication.
        ranks: global ranks of the group.
        backend: of this rank's device.
    """

    def __init__(self, objects: Objects, ranks: Group, backend: Backend):
        self._objects = objects
        self._ranks = ranks
        self._backend = backend

    def compare(self, text: str, tensors: Sequence[Sequence[torch.Tensor]], signature: Any) -> None:
        """Checks that all ranks make one call, with one batch. All of them call it.

        Args:
            text: the call, or the error that it ended in.
            tensors: tensor leaves of every microbatch.
            signature: what else has to be equal.

        Raises:
            RankMismatch: another rank has another call or other values; on all of them.
        """
        if len(self._ranks) == 1:
            return
        shapes = [str(list(value.shape)) for value in (tensors[0] if tensors else ())]
        text += f" with microbatches of {', '.join(shapes) or 'nothing'}"
        own = text, self._digest(tensors, str(signature))
        everyone = self._objects.allgather(own, self._ranks)
        for rank, (other_text, digest) in zip(self._ranks, everyone, strict=True):
            if (other_text, digest) == everyone[0]:
                continue
            first = self._ranks[0]
            if other_text != everyone[0][0]:
                what = f"rank {first} came with {everyone[0][0]}, and rank {rank} with {other_text}"
            else:
                what = f"the values that ranks {first} and {rank} were given differ, in {text}"
            raise RankMismatch(
                f"the ranks {list(self._ranks)} share the tensors of a model, and have to call the "
                f"step function with the same batch: {what}. Divide the data by smp.rdp_rank() and "
                f"smp.rdp_size(), and draw it from the same seed in the whole group."
            )

    def seed(self, own: int) -> int:
        """The first rank's seed, on all ranks. All of them call it."""
        if len(self._ranks) == 1:
            return own
        return self._objects.allgather(own, self._ranks)[0]

    def _digest(self, tensors: Sequence[Sequence[torch.Tensor]], text: str) -> str:
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        for value in self._backend.get([t for leaves in tensors for t in leaves]):
            digest.update(as_memory(value.contiguous()))
        return digest.hexdigest()
