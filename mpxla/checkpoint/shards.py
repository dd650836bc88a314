"""Which tensors a checkpoint holds, who writes them, and how any part of them is found again.

Tensors are named by what they are (`model`, parameter name; `optimizer`, state key and parameter
name), not by who had them, so a checkpoint of one topology is read under any other. A *slot* is a
run of elements of one flattened tensor; a rank may hold a whole tensor or a slot of it (sharded
optimizer state), and the tensor may be one part of several (tensor parallelism). Ranks that hold
the same slot share the work of writing.

`torch.distributed.checkpoint` was not taken for this: it unpickles its `.metadata` file without
`weights_only`, its collectives do not notice a dead rank, and it neither keeps checksums nor SMP's
layout (`benchmarks/checkpoint.py` compares the speed).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mpxla.checkpoint.files import load_object
from mpxla.comm.codec import register
from mpxla.errors import CheckpointError
from mpxla.nn.shards import Shard

__all__ = ["ShardIndex", "ShardReader", "Slot", "assign_writers", "index_of"]


@register
class Slot(NamedTuple):
    """A run of elements of one flattened tensor."""

    kind: str
    """"model" or "optimizer"."""
    name: str
    """Parameter or buffer."""
    key: str
    """State key of the optimizer; empty for the model."""
    dtype: str
    """Such as "float32"."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: int
    """Position of the first element."""
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] -- hides `tuple.count`
    """Number of elements."""
    part: tuple[int, ...] = ()
    """`Shard.place` of the part in which positions count; empty where they do in the whole."""

    @property
    def shard(self) -> Shard | None:
        """The part in which positions count; None for the whole tensor."""
        return Shard(self.shape, *self.part) if self.part else None

    @property
    def num_elements(self) -> int:
        """Elements of the tensor in which positions count."""
        return math.prod(self.shape) // (self.part[2] if self.part else 1)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor in which positions count."""
        return self.offset == 0 and self.count == self.num_elements

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.count * getattr(torch, self.dtype).itemsize

    @property
    def title(self) -> str:
        """Its key in the file that holds it."""
        title = f"{self.key}/{self.name}" if self.key else self.name
        if self.part:
            title += f"@{self.part[1]}/{self.part[2]}"
        return title if self.is_whole else f"{title}[{self.offset}:{self.offset + self.count}]"


def assign_writers(held: Sequence[Sequence[Slot]]) -> list[list[Slot]]:
    """By rank, the slots that it writes of those that it holds, so that the largest share is small.

    The same on every rank.
    """
    holders: dict[Slot, list[int]] = {}
    for rank, slots in enumerate(held):
        for slot in slots:
            holders.setdefault(slot, []).append(rank)
    load = [0] * len(held)
    shares: list[list[Slot]] = [[] for _ in held]
    # Few choices first, then large ones: the classic greedy order.
    for slot in sorted(holders, key=lambda s: (len(holders[s]), -s.num_bytes)):
        writer = min(holders[slot], key=lambda rank: (load[rank], rank))
        load[writer] += slot.num_bytes
        shares[writer].append(slot)
    return shares


class ShardIndex:
    """What is in which file of a checkpoint.

    Entries are slots with the names of files. Aliases are further names of tied parameters, with
    the name under which they were saved; numbers are values of the optimizer that are no tensors,
    by name and key.
    """

    def __init__(
        self,
        entries: Iterable[tuple[Slot, str]],
        aliases: Mapping[str, str],
        numbers: Mapping[str, Mapping[str, Any]],
    ):
        self.aliases = dict(aliases)
        self.numbers = dict(numbers)
        self._slots: dict[tuple[str, str], dict[str, list[tuple[Slot, str]]]] = {}
        for slot, file in entries:
            keys = self._slots.setdefault((slot.kind, slot.name), {})
            keys.setdefault(slot.key, []).append((slot, file))

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Names and shapes of everything of a kind."""
        held = [(name, keys) for (k, name), keys in self._slots.items() if k == kind]
        return {name: self.shape(kind, name, next(iter(keys))) for name, keys in held}

    def saved_name(self, kind: str, names: Iterable[str]) -> str | None:
        """The name under which a tensor with any of these names was saved, if it was."""
        for name in names:
            for candidate in (name, self.aliases.get(name, name)):
                if (kind, candidate) in self._slots:
                    return candidate
        return None

    def keys(self, kind: str, name: str) -> list[str]:
        """State keys that were saved as tensors for a name."""
        return list(self._slots.get((kind, name), ()))

    def parts(
        self, kind: str, name: str, key: str
    ) -> dict[tuple[int, ...], list[tuple[Slot, str]]]:
        """Where a tensor is, part by part, each in order of position; `()` is the whole."""
        found: dict[tuple[int, ...], list[tuple[Slot, str]]] = {}
        slots = self._slots.get((kind, name), {}).get(key, [])
        for slot, file in sorted(slots, key=lambda entry: (entry[0].part, entry[0].offset)):
            found.setdefault(slot.part, []).append((slot, file))
        return found

    def shape(self, kind: str, name: str, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._slots[kind, name][key][0][0].shape


class ShardReader:
    """Reads parts of tensors from the files of a checkpoint folder.

    Files are mapped, so only what is asked for is read.
    """

    def __init__(self, folder: Path, index: ShardIndex):
        self.index = index
        self.num_bytes_read = 0
        self._folder = folder
        self._files: dict[str, dict[str, torch.Tensor]] = {}

    def whole(
        self, kind: str, name: str, key: str = "", shard: Shard | None = None
    ) -> torch.Tensor:
        """A tensor, or a part of it, with its shape; may be mapped from the file, so copy it."""
        shape = self.index.shape(kind, name, key) if shard is None else shard.shape
        return self.flat(kind, name, key, shard=shard).view(shape)

    def flat(
        self,
        kind: str,
        name: str,
        key: str = "",
        offset: int = 0,
        count: int | None = None,
        shard: Shard | None = None,
    ) -> torch.Tensor:
        """Elements `offset` to `offset + count`, or all that follow, of the flattened tensor.

        With a shard, positions count in that part of the tensor, in whatever parts it was saved.

        Raises:
            CheckpointError: the checkpoint does not hold all of them.
        """
        parts = self.index.parts(kind, name, key)
        wanted = () if shard is None else shard.place
        if wanted in parts or not parts:
            return self._run(parts.get(wanted, []), (kind, name, key), offset, count)
        pieces = {p: self._run(slots, (kind, name, key)) for p, slots in parts.items()}
        whole = self._joined(parts, pieces, (kind, name, key))
        values = (whole if shard is None else shard.take(whole)).reshape(-1)
        return values[offset:] if count is None else values[offset : offset + count]

    def _joined(
        self,
        parts: Mapping[tuple[int, ...], Sequence[tuple[Slot, str]]],
        pieces: Mapping[tuple[int, ...], torch.Tensor],
        what: tuple[str, str, str],
    ) -> torch.Tensor:
        """The whole tensor of all parts that were saved."""
        shards = [slots[0][0].shard for slots in parts.values()]
        first = shards[0]
        if first is None:
            return pieces[()].view(self.index.shape(*what))
        missing = set(range(first.size)) - {s.index for s in shards if s is not None}
        if missing:
            raise self._incomplete(f"part {min(missing)} of {first.size}", *what)
        ordered = sorted((s for s in shards if s is not None), key=lambda s: s.index)
        return first.join([pieces[s.place].view(s.shape) for s in ordered])

    def _run(
        self,
        slots: Sequence[tuple[Slot, str]],
        what: tuple[str, str, str],
        offset: int = 0,
        count: int | None = None,
    ) -> torch.Tensor:
        """Consecutive elements out of the slots of one part."""
        whole = slots[0][0].num_elements if slots else 0
        end = whole if count is None else offset + count
        parts, position = [], offset
        for slot, file in slots:
            last = min(slot.offset + slot.count, end)
            if slot.offset <= position < last:
                values = self._open(file)[slot.title].reshape(-1)
                parts.append(values[position - slot.offset : last - slot.offset])
                position = last
        if position < end or not slots:
            raise self._incomplete(f"elements {position} to {end}", *what)
        self.num_bytes_read += sum(part.nbytes for part in parts)
        if not parts:
            return torch.empty(0, dtype=getattr(torch, slots[0][0].dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _incomplete(self, missing: str, kind: str, name: str, key: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder} does not hold {missing} of {kind} {key or ''} {name}; it may come "
            f"from another model. Use another checkpoint."
        )

    def _open(self, file: str) -> dict[str, torch.Tensor]:
        if file not in self._files:
            self._files[file] = load_object(self._folder / file, mmap=True)
        return self._files[file]


def index_of(manifest: Mapping[str, Any]) -> ShardIndex:
    """What the manifest of a partial checkpoint says about tensors and numbers."""
    entries = []
    numbers: dict[str, dict[str, Any]] = {}
    for part in manifest["parts"]:
        for *fields, file in part["slots"]:
            kind, name, key, dtype, shape, offset, count, *place = fields
            places = map(tuple, place)  # older checkpoints have none
            slot = Slot(kind, name, key, dtype, tuple(shape), offset, count, *places)
            entries.append((slot, file))
        for name, key, value in part["numbers"]:
            numbers.setdefault(name, {})[key] = value
    return ShardIndex(entries, manifest["aliases"], numbers)
