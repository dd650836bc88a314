"""What optimizers update where replicas divide the updates.

    Shard     parameters and gradients are whole, and state is divided (ZeRO-1). Parameters lie in
              flat buckets, each cut into as many equal shards as there are replicas; an optimizer
              updates *pieces*, flat, of the parameters that the shard of this replica touches.
    Pieces    gradients are divided as well, parameter by parameter (ZeRO-2). An optimizer updates a
              piece of each parameter, or of a master.
    Parts     parameters are divided likewise (ZeRO-3). Programs take a part in the parameter's
              type; an optimizer updates the same tensor, or a wider copy of it (a master).

Of the first, with two replicas:

    bucket     | a ---------- | b ------- | c --- | pad |
    shards     | replica 0      | replica 1      |          replica 1 holds: b[1:], c

    gradients  -- reduce-scatter -->  piece.grad
    step()     renew: pieces take what was written to the parameters
               the inner optimizer updates the pieces
               publish: all-gather of the shards -> parameters

Pieces and gradients may be wider than the parameters (masters); what is gathered has the type of
the parameters, so that half the bytes travel. Elementwise optimizers give the same numbers this
way. This file must not know optimizers' classes, nor how gradients got to where they are.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from mpxla.comm.transport import Group, Transport
from mpxla.device.backend import Buffer
from mpxla.parallel.gradients.buckets import Bucket, Packer, cut_gradients
from mpxla.parallel.programs import Programs
from mpxla.parallel.updates.copy import Copies, Range, UpdateCopy, in_dtypes
from mpxla.runtime.state import ModelState
from mpxla.stage.flat import FlatShard
from mpxla.stage.spec import TensorSpec

__all__ = ["Parts", "Pieces", "Shard", "ranges_of"]


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


def _travelling(
    lengths: Sequence[int], dtype: torch.dtype, *pieces: torch.Tensor
) -> list[torch.Tensor]:
    """Pieces to one flat tensor [elements of all], each padded to the first rank's length."""
    padded = [
        nn.functional.pad(piece.to(dtype), (0, length - piece.shape[0]))
        for piece, length in zip(pieces, lengths, strict=True)
    ]
    return [torch.cat(padded)]


def _joined(shards: Sequence[FlatShard], flat: torch.Tensor) -> list[torch.Tensor]:
    """Flat tensors of all ranks [ranks, elements of all] to whole parameters, in order."""
    columns = flat.split([shard.length for shard in shards], 1)
    return [shard.join(part).clone() for shard, part in zip(shards, columns, strict=True)]


class Pieces(Copies):
    """This rank's pieces of some parameters that are whole on every rank.

    The parameters are compute copies, of one type as far as they have shards. The group is in the
    order of the shards.
    """

    def __init__(
        self,
        shards: Mapping[str, FlatShard],
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        transport: Transport,
        group: Group,
        programs: Programs,
    ):
        self._shards = tuple(shards.values())
        self._transport, self._group = transport, group
        extents = [shard.extent for shard in self._shards]
        super().__init__({name: parameters[name] for name in shards}, extents, dtype, programs)

    def publish(self) -> Callable[[], Sequence[Buffer]]:
        """Starts gathering the pieces of all ranks; the result gives the compute copies."""
        backend, dtype = self._programs.backend, self._parameters[0].dtype
        settings = tuple(shard.length for shard in self._shards), dtype
        pieces = backend.adopt(self._held)
        (flat,) = self._programs.run("pieces of parameters", _travelling, settings, pieces)
        handle = self._transport.all_gather(flat, self._group)

        def joined() -> Sequence[Buffer]:
            gathered = backend.put([handle.result()], owned=True)
            settings = (self._shards,)
            return self._programs.run("parameters of pieces", _joined, settings, gathered)

        return joined


class Parts:
    """This rank's parts of divided parameters, and what optimizers update in their place."""

    def __init__(
        self,
        state: ModelState,
        names: Sequence[str],
        dtype_of: Callable[[str], torch.dtype],
        programs: Programs,
    ):
        self.names = tuple(names)
        self._state = state
        self._programs = programs
        self.copies = {name: self._copy(name, dtype_of(name)) for name in names}

    def _copy(self, name: str, dtype: torch.dtype) -> UpdateCopy:
        part, shard = self._state.parts[name], self._state.shards[name]
        if part.dtype != dtype:
            (wide,) = in_dtypes(self._programs, [part], [dtype])
            (value,) = self._programs.backend.publish([wide])
            part = nn.Parameter(value, requires_grad=part.requires_grad)
        return UpdateCopy(name, shard.whole, shard.extent, part)

    def publish(self) -> Callable[[], Sequence[Buffer]]:
        """Starts rounding masters; the result gives the parts of `wide_names`."""
        masters = [self.copies[name].parameter for name in self.wide_names]
        dtypes = [self._state.parts[name].dtype for name in self.wide_names]
        values = in_dtypes(self._programs, masters, dtypes)
        return lambda: values

    @property
    def wide_names(self) -> list[str]:
        """Those of the parameters that have masters."""
        held = self._state.parts
        return [name for name, copy in self.copies.items() if copy.parameter is not held[name]]
