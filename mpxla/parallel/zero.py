"""Optimizer state divided over replicas (ZeRO-1): every replica updates its share of the elements.

Parameters lie in flat buckets, and each bucket is cut into as many equal shards as there are
replicas. The inner optimizer holds *pieces*, flat parameters, one for every parameter that the
shard of this replica touches; param groups and LR schedulers stay as they are.

    bucket     | a ---------- | b ------- | c --- | pad |
    shards     | replica 0      | replica 1      |          replica 1 holds: b[1:], c

    gradients  -- reduce-scatter -->  piece.grad
    step()     refresh: pieces take the parameters' values     (the parameters are the truth)
               the inner optimizer updates the pieces
               publish: all-gather of the shards -> parameters

Elementwise optimizers give the same numbers this way. This file must not know optimizers' classes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from mpxla.comm.handle import Handle
from mpxla.device.backend import Executable
from mpxla.errors import CheckpointError
from mpxla.parallel.buckets import Bucket, Packer, fill_buckets
from mpxla.parallel.replica import Replica, store
from mpxla.parallel.sums import GradientPrograms
from mpxla.stage.spec import TensorSpec

__all__ = ["Piece", "Range", "ShardedParameters", "cut_state", "join_states", "ranges_of"]

Range = tuple[int, int]
"""First element and end of a piece, in its flattened parameter."""


@dataclass(frozen=True, eq=False)
class Piece:
    """What one replica updates of one parameter.

    Attributes:
        name: canonical name of the parameter.
        start: its first element, in the flattened parameter.
        stop: its end.
        parameter: stands in for the parameter in the inner optimizer; flat.
    """

    name: str
    start: int
    stop: int
    parameter: nn.Parameter


def ranges_of(bucket: Bucket, index: int) -> dict[str, Range]:
    """Which elements of each parameter of a bucket one shard holds.

    Args:
        bucket: cut into `bucket.parts` shards.
        index: which of them.
    """
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


class _Cutting(nn.Module):
    """Parameters to flat pieces."""

    def __init__(self, ranges: Sequence[Range]):
        super().__init__()
        self._ranges = tuple(ranges)

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [
            tensor.reshape(-1)[start:stop]
            for tensor, (start, stop) in zip(tensors, self._ranges, strict=True)
        ]


class _Shard:
    """The share of this replica in one bucket: its pieces, and programs to cut and to pack them."""

    def __init__(self, bucket: Bucket, replica: Replica):
        self.bucket = bucket
        self.length = bucket.num_elements // bucket.parts
        self._replica = replica
        self._programs = GradientPrograms(replica.backend)
        self._ranges = ranges_of(bucket, replica.index)
        self._cut, self._packer = self._compile()
        values = replica.backend.publish(self._slices())
        self.pieces = {
            name: Piece(name, start, stop, nn.Parameter(value))
            for (name, (start, stop)), value in zip(self._ranges.items(), values, strict=True)
        }

    def _compile(self) -> tuple[Executable | None, Packer | None]:
        if not self._ranges:
            return None, None  # the last shards of a bucket of few elements are padding
        names, ranges, bucket = tuple(self._ranges), list(self._ranges.values()), self.bucket
        spec_of = dict(zip(bucket.names, bucket.specs, strict=True))
        title = f"shard of {bucket.names[0]}"
        specs = [spec_of[name] for name in names]
        cut = self._replica.backend.compile(title, _Cutting(ranges), specs)
        pieces = tuple(TensorSpec((stop - start,), bucket.dtype) for start, stop in ranges)
        flat = Bucket(names, pieces, bucket.holders, self.length)
        return cut, Packer(flat, names, bucket.dtype, self._replica.backend)

    def _slices(self) -> list[torch.Tensor]:
        if self._cut is None:
            return []
        parameters = [self._replica.state.parameters[name] for name in self._ranges]
        return self._cut(self._replica.backend.adopt(parameters))

    def refresh(self) -> None:
        """Pieces take the values of the parameters."""
        for piece, value in zip(self.pieces.values(), self._slices(), strict=True):
            (piece.parameter.data,) = self._replica.backend.publish([value])

    def publish(self) -> Handle[torch.Tensor]:
        """Starts gathering the shards of all replicas; the result is [parts, length]."""
        replica = self._replica
        if self._packer is None:
            flat = torch.zeros(self.length, dtype=self.bucket.dtype)
        else:
            values = [piece.parameter for piece in self.pieces.values()]
            flat = self._packer(replica.backend.adopt(values), 1.0)
        return replica.transport.all_gather(flat, replica.group)

    def adopt(self, gathered: torch.Tensor) -> None:
        """Parameters take the values that all replicas published."""
        values = self._programs.parts(gathered, self.bucket.cuts, self.bucket.dtype)
        store(self._replica, self.bucket.names, values)

    def receive_gradients(self, flat: torch.Tensor, trained: frozenset[str]) -> None:
        """Adds this replica's part [length] of a reduced bucket to the pieces' gradients."""
        start = 0
        parameters, cuts = [], []
        for piece in self.pieces.values():
            size = piece.stop - piece.start
            if piece.name in trained:
                parameters.append(piece.parameter)
                cuts.append((start, (size,)))
            start += size
        self._programs.add_to(parameters, self._programs.parts(flat, cuts, self.bucket.dtype))


class ShardedParameters:
    """All trainable parameters of one rank, divided over its data-parallel group.

    All ranks of the group make it at the same point, once their parameters are placed and equal.

    Args:
        replica: this rank among the replicas.
        parameter_ranks: pipeline ranks that hold each parameter; others are left out.
        capacity_bytes: largest bucket.
    """

    def __init__(
        self,
        replica: Replica,
        parameter_ranks: Mapping[str, tuple[int, ...]],
        capacity_bytes: int,
    ):
        groups: dict[tuple[int, ...], dict[str, TensorSpec]] = {}
        for name, parameter in replica.state.local_parameters():
            if parameter.requires_grad and name in parameter_ranks:
                specs = groups.setdefault(parameter_ranks[name], {})
                specs[name] = TensorSpec.of(parameter)
        self._replica = replica
        self._shards = {
            bucket: _Shard(bucket, replica)
            for holders, specs in sorted(groups.items())
            for bucket in fill_buckets(specs, holders, capacity_bytes, replica.count)
        }
        self._bucket_of = {name: bucket for bucket in self._shards for name in bucket.names}

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the same order on all replicas."""
        return list(self._shards)

    def __contains__(self, name: str) -> bool:
        """Whether a parameter is divided."""
        return name in self._bucket_of

    def piece_of(self, name: str) -> Piece | None:
        """This replica's piece of a parameter, if it has one."""
        return self._shards[self._bucket_of[name]].pieces.get(name)

    def pieces(self) -> list[Piece]:
        """All pieces of this replica."""
        return [piece for shard in self._shards.values() for piece in shard.pieces.values()]

    def holders_of(self, name: str) -> tuple[int, ...]:
        """Pipeline ranks that hold a parameter."""
        return self._bucket_of[name].holders

    def receive_gradients(
        self, bucket: Bucket, flat: torch.Tensor, trained: frozenset[str]
    ) -> None:
        """Adds this replica's part of a reduced bucket to the gradients of its pieces.

        Args:
            bucket: which one.
            flat: [num_elements / replicas], on the host or on the device.
            trained: parameters that the step trains; the others get no gradient.
        """
        self._shards[bucket].receive_gradients(flat, trained)

    def refresh(self, names: Iterable[str]) -> None:
        """Pieces take the current values of the parameters named, before an update."""
        for shard in self._concerned(names):
            shard.refresh()

    def publish(self, names: Iterable[str]) -> None:
        """Parameters take the values of all replicas' pieces, after an update. Collective."""
        concerned = self._concerned(names)
        for shard, handle in [(shard, shard.publish()) for shard in concerned]:
            shard.adopt(handle.result())

    def clear_gradients(self, set_to_none: bool) -> None:
        """Forgets the gradients of all pieces, or makes them zeros."""
        for piece in self.pieces():
            gradient = piece.parameter.grad
            zeros = None if set_to_none or gradient is None else torch.zeros_like(gradient)
            piece.parameter.grad = zeros

    def _concerned(self, names: Iterable[str]) -> list[_Shard]:
        buckets = {self._bucket_of[name] for name in names}
        return [shard for bucket, shard in self._shards.items() if bucket in buckets]


# --- optimizer state ----------------------------------------------------------------------------


def cut_state(
    state: Mapping[str, Any], shape: Sequence[int], start: int, stop: int
) -> dict[str, Any]:
    """The part of a parameter's optimizer state that belongs to one piece.

    Args:
        state: of the whole parameter: tensors of its shape, and values such as a step count.
        shape: the parameter's.
        start: first element of the piece.
        stop: its end.
    """
    return {
        key: value.reshape(-1)[start:stop].clone()
        if isinstance(value, torch.Tensor) and value.shape == torch.Size(shape)
        else value
        for key, value in state.items()
    }


def join_states(
    parts: Sequence[tuple[Mapping[int, Any], Mapping[int, tuple[Range, tuple[int, ...]]]]],
) -> dict[int, Any]:
    """Optimizer state of whole parameters from that of the pieces of all replicas.

    Args:
        parts: for every replica, by position of the parameter: the state of its piece, and
            (range of the piece, shape of the parameter).

    Raises:
        CheckpointError: pieces of a parameter are missing.
    """
    found: dict[int, list[tuple[Range, Mapping[str, Any], tuple[int, ...]]]] = {}
    for states, ranges in parts:
        for position, state in states.items():
            extent, shape = ranges[position]
            found.setdefault(position, []).append((extent, state, shape))
    return {position: _joined(position, pieces) for position, pieces in sorted(found.items())}


def _joined(
    position: int, pieces: list[tuple[Range, Mapping[str, Any], tuple[int, ...]]]
) -> dict[str, Any]:
    pieces.sort(key=lambda piece: piece[0])
    states = {extent: state for extent, state, _ in pieces}
    shape = pieces[0][2]
    ends = [0, *(stop for _, stop in states)]
    is_complete = [start for start, _ in states] == ends[:-1] and ends[-1] == prod(shape)
    joined: dict[str, Any] = {}
    for key, value in pieces[0][1].items():
        values = [state.get(key) for state in states.values()]
        is_cut = [
            isinstance(v, torch.Tensor) and v.shape == (stop - start,)
            for v, (start, stop) in zip(values, states, strict=True)
        ]
        if any(is_cut) and not (is_complete and all(is_cut)):
            there = [
                f"{a} to {b}" for (a, b), is_there in zip(states, is_cut, strict=True) if is_there
            ]
            raise CheckpointError(
                f"the optimizer state {key!r} of parameter {position}, of shape {list(shape)}, is "
                f"not complete: of {prod(shape)} elements there are {', '.join(there)}. Give the "
                f"partial states of all replicas, each on the rank that saved it."
            )
        joined[key] = torch.cat(values).view(shape) if any(is_cut) else value
    return joined
