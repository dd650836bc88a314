"""Divided parameters, whole for as long as a step runs: the key `sdp_gather: "step"`.

Stage programs take whole parameters then, and every microbatch finds them. This module must not
know who updates the parts.
"""

from collections.abc import Iterable, Mapping

import torch

from mpxla.comm.transport import Members
from mpxla.device.backend import Backend, Buffer
from mpxla.stage.flat import FlatShard

__all__ = ["Gathering"]


class Gathering:
    """Makes whole parameters of the parts that the ranks of a group have.

    All of them name the same parameters: those that their stages read.
    """

    def __init__(
        self,
        names: Iterable[str],
        shards: Mapping[str, FlatShard],
        members: Members,
        backend: Backend,
    ):
        self._shards = {name: shards[name] for name in sorted(set(names) & set(shards))}
        self._members = members
        self._backend = backend

    @property
    def names(self) -> tuple[str, ...]:
        """What it makes whole, in order."""
        return tuple(self._shards)

    def __call__(self, held: Mapping[str, Buffer]) -> dict[str, Buffer]:
        """Whole parameters by name. All ranks of the group call it."""
        ranks, transport = self._members
        handles = [
            transport.all_gather(shard.padded(self._backend.view(held[name])), ranks)
            for name, shard in self._shards.items()
        ]
        values: list[torch.Tensor] = []
        for shard, handle in zip(self._shards.values(), handles, strict=True):
            flat = handle.result().flatten()
            values.append(flat[: shard.num_elements].view(shard.whole))
        return dict(zip(self._shards, self._backend.put(values, owned=True), strict=True))
