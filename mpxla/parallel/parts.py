"""What optimizers update where gradients are divided parameter by parameter.

    Parts     parameters are divided as well (ZeRO-3). Programs take a part in the parameter's type;
              an optimizer updates the same tensor, or a wider copy of it (a master).
    Pieces    parameters are whole (ZeRO-2). An optimizer updates a piece of each, or of a master;
              afterwards the pieces of all ranks are gathered.

This file must not know how gradients got to where they are.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from mpxla.comm.transport import Group, Transport
from mpxla.device.backend import Buffer
from mpxla.parallel.programs import Programs
from mpxla.parallel.update_copy import Copies, UpdateCopy, in_dtypes
from mpxla.runtime.state import ModelState
from mpxla.stage.flat import FlatShard

__all__ = ["Parts", "Pieces"]


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
