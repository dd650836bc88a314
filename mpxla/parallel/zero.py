"""Optimizer state divided over replicas (ZeRO-1): every replica updates its share of the elements.

Parameters lie in flat buckets, and each bucket is cut into as many equal shards as there are
replicas. The inner optimizer holds *pieces*, flat parameters, one for every parameter that the
shard of this replica touches; param groups and LR schedulers stay as they are.

    bucket     | a ---------- | b ------- | c --- | pad |
    shards     | replica 0      | replica 1      |          replica 1 holds: b[1:], c

    gradients  -- reduce-scatter -->  piece.grad
    step()     renew: pieces take what was written to the parameters
               the inner optimizer updates the pieces
               publish: all-gather of the shards -> parameters

Pieces and gradients may be wider than the parameters (masters); what is gathered has the type of
the parameters, so that half the bytes travel. Elementwise optimizers give the same numbers this
way. This file must not know optimizers' classes.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from mpxla.comm.transport import Group, Transport
from mpxla.device.backend import Buffer
from mpxla.parallel.buckets import Bucket, Packer
from mpxla.parallel.programs import Programs
from mpxla.parallel.sums import cut_gradients
from mpxla.parallel.update_copy import Copies, Range
from mpxla.stage.spec import TensorSpec

__all__ = ["Shard", "ranges_of"]


def ranges_of(bucket: Bucket, index: int) -> dict[str, Range]:
    """Which elements of each parameter of a bucket its shard of an index holds."""
    length = bucket.num_elements // bucket.parts
    low, high = index * length, (index + 1) * length
    ranges: dict[str, Range] = {}
    first = 0
    for name, size in zip(bucket.names, bucket.sizes, strict=True):
        start, stop = max(low - first, 0), min(high - first, size)
        if start < stop:
            ranges[name] = (start, stop)
        first += size
    return ranges


class Shard(Copies):
    """The share of this replica in one bucket, and the ways there and back.

    The bucket has the specs of gradients; the parameters are compute copies, those of the bucket
    among them; the group is that of the same parameters, by dp_rank. `names` are the bucket's.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        transport: Transport,
        group: Group,
        programs: Programs,
    ):
        self.bucket = bucket
        self._length = bucket.num_elements // bucket.parts
        self._transport = transport
        self._group = group
        self._dtype, self._piece_dtype = parameters[bucket.names[0]].dtype, dtype
        self._ranges = ranges_of(bucket, group.index(transport.rank))
        held = {name: parameters[name] for name in self._ranges}
        super().__init__(held, list(self._ranges.values()), dtype, programs)
        self.names = bucket.names
        self._packer = self._make_packer()

    def _make_packer(self) -> Packer | None:
        if not self._ranges:
            return None  # the last shards of a bucket of few elements are padding
        names, bucket = tuple(self._ranges), self.bucket
        pieces = tuple(TensorSpec((b - a,), self._piece_dtype) for a, b in self._ranges.values())
        flat = Bucket(names, pieces, bucket.holders, self._length)
        return Packer(flat, names, self._dtype, self._programs.backend)

    def publish(self) -> Callable[[], Sequence[Buffer]]:
        """Starts gathering the shards of all replicas; the result gives the compute copies."""
        if self._packer is None:
            flat = torch.zeros(self._length, dtype=self._dtype)
        else:
            flat = self._packer(self._programs.backend.adopt(self._held), 1.0)
        handle = self._transport.all_gather(flat, self._group)
        return lambda: cut_gradients(self._programs, handle.result(), self.bucket.cuts, self._dtype)

    def parts_of(
        self, flat: torch.Tensor, trained: frozenset[str]
    ) -> tuple[list[nn.Parameter], list[Buffer]]:
        """What this replica's part of a reduced bucket holds: pieces, and gradients for them.

        Args:
            flat: [num_elements / replicas], on the host or on the device.
            trained: parameters that the step trains; the others get no gradient.
        """
        start = 0
        parameters, cuts = [], []
        for name, (first, end) in self._ranges.items():
            if name in trained:
                parameters.append(self.copies[name].parameter)
                cuts.append((start, (end - first,)))
            start += end - first
        return parameters, cut_gradients(self._programs, flat, cuts, self.bucket.dtype)
