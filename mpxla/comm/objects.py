"""Python objects between ranks: the blocking send, recv_from, broadcast and allgather of SMP.

Meanings follow the SMP reference: a call returns once the matching calls were made, `broadcast` is
called by the sender alone, and `recv_from` takes whatever its source sent next, by send or by
broadcast. Hence every receiver acknowledges, and the sender waits for that.

What mpxla itself exchanges is data (`codec`); the user's objects are pickled. Tensors may sit
anywhere inside and arrive on the host: a tensor on a device is read back first, and a view travels
without the rest of its storage.

Unpickling runs code, so nothing is opened before its seal has shown that it comes from a rank of
this job (`seal`). This file does not know groups by name (the session translates) nor what carries
the bytes.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from mpxla.comm.packing import as_bytes, as_memory, pack
from mpxla.comm.transport import Group, Transport, check_group
from mpxla.errors import MpxlaError

__all__ = [
    "OBJECTS",
    "Entry",
    "Format",
    "Objects",
    "dump",
    "innermost",
    "pickled",
    "restore",
    "unpicklable",
    "unpickled",
]

_BLOCK_BYTES = 4096
_PADDING_BYTES = 1 << 20


class Format(NamedTuple):
    """How objects become bytes."""

    channel: str
    """On which they travel."""
    dump: Callable[[Any, str], torch.Tensor]
    """(object, purpose for errors) -> flat uint8 host tensor."""
    restore: Callable[[torch.Tensor, int, int], Any]
    """(that tensor, source, own rank) -> object."""


class Objects:
    """Object communication over a transport. Ranks are global; groups are ascending tuples."""

    def __init__(self, transport: Transport, form: "Format | None" = None) -> None:
        """Uses `transport` and its seal, on channels of its own; pickles if no form is given."""
        self._transport = transport
        self._seal = transport.seal
        self._form = form or OBJECTS
        self._channel = self._form.channel
        self._receipt_channel = f"{self._channel}-receipt"

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self._transport.rank

    def send(self, obj: Any, dst: int) -> None:
        """Sends an object; returns after rank `dst` has taken it by `recv_from`.

        Raises:
            MpxlaError: The object cannot be pickled; names the part that cannot.
            PeerFailure: The receiver failed or left.
        """
        self._deliver(self._form.dump(obj, f"send to rank {dst}"), (dst,))

    def broadcast(self, obj: Any, ranks: Group) -> None:
        """Sends an object to the other ranks of a group; returns after all have taken it.

        Called by the sender alone; every other rank of the group calls `recv_from`.
        """
        ranks = check_group(ranks, self._transport.rank, self._transport.world_size)
        others = tuple(rank for rank in ranks if rank != self._transport.rank)
        self._deliver(self._form.dump(obj, f"broadcast to ranks {others}"), others)

    def recv_from(self, src: int) -> Any:
        """Returns the next object that rank `src` sends or broadcasts to this rank.

        Raises:
            MpxlaError: The object cannot be unpickled here, or does not come from that rank.
            PeerFailure: The sender failed or left.
        """
        data = self._take(src)
        self._transport.send([torch.empty(0, dtype=torch.uint8)], src, self._receipt_channel)
        return self._form.restore(data, src, self._transport.rank)

    def post(self, obj: Any, ranks: Sequence[int], purpose: str) -> None:
        """Sends an object to other ranks, which `take` it; waits for nobody."""
        data = self._form.dump(obj, purpose)
        for dst in ranks:
            self._post(data, dst)

    def take(self, src: int, what: str | None = None) -> Any:
        """Returns the next object that rank `src` posts to this rank; sends no receipt.

        `what` is the object in words, for errors of waiting.

        Raises:
            MpxlaError: It does not come from that rank.
            PeerFailure: The sender failed or left.
        """
        return self._form.restore(self._take(src, what), src, self._transport.rank)

    def allgather(self, obj: Any, ranks: Group) -> list[Any]:
        """What every rank passes, in the order of `ranks`, each of which calls it."""
        ranks = tuple(ranks)
        data = self._form.dump(obj, f"allgather with ranks {ranks}")
        own = pack([self._seal.close(data, self._channel, ranks), data])
        # Size and first bytes together: most objects need no second exchange.
        block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
        block[:8] = torch.tensor([own.numel()]).view(torch.uint8)
        first = own[: _BLOCK_BYTES - 8]
        block[8 : 8 + first.numel()] = first
        blocks = self._transport.all_gather(block, ranks).result()
        sizes = blocks[:, :8].contiguous().view(torch.int64).flatten().tolist()
        if max(sizes) <= _BLOCK_BYTES - 8:
            parts = [row[8 : 8 + size] for row, size in zip(blocks, sizes, strict=True)]
        else:
            parts = self._exchange(own, sizes, ranks)
        me, found = self._transport.rank, []
        for part, src in zip(parts, ranks, strict=True):
            opened = self._seal.open(part, self._channel, src, ranks)
            found.append(self._form.restore(opened, src, me))
        return found

    def barrier(self, ranks: Group) -> None:
        """Returns when every rank of `ranks` has called it."""
        self._transport.barrier(ranks).result()

    def _deliver(self, data: torch.Tensor, receivers: Group) -> None:
        receipts = []
        for dst in receivers:
            self._post(data, dst)
            receipt = self._transport.recv(None, dst, self._receipt_channel)
            receipt.what = f"rank {dst} to call recv_from({self._transport.rank})"
            receipts.append(receipt)
        for receipt in receipts:
            receipt.result()

    def _post(self, data: torch.Tensor, dst: int) -> None:
        header = self._seal.close(data, self._channel, (dst,))
        self._transport.send([header, data], dst, self._channel)

    def _take(self, src: int, what: str | None = None) -> torch.Tensor:
        handle = self._transport.recv(None, src, self._channel)
        handle.what = what or handle.what
        return self._seal.open(handle.result(), self._channel, src, (self._transport.rank,))

    def _exchange(self, own: torch.Tensor, sizes: list[int], ranks: Group) -> list[torch.Tensor]:
        """Gathers pieces of unequal size: padded to the largest, or each on its own."""
        largest = max(sizes)
        if largest * len(sizes) <= 2 * sum(sizes) + _PADDING_BYTES:
            padded = torch.zeros(largest, dtype=torch.uint8)
            padded[: own.numel()] = own
            rows = self._transport.all_gather(padded, ranks).result()
            return [row[:size] for row, size in zip(rows, sizes, strict=True)]
        handles = []
        for src, size in zip(ranks, sizes, strict=True):
            piece = own if src == self._transport.rank else torch.empty(size, dtype=torch.uint8)
            handles.append(self._transport.broadcast(piece, src, ranks))
        return [handle.result() for handle in handles]


class _Pickler(pickle.Pickler):
    """Pickles tensors from any device as their own elements."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        is_parameter = type(obj) is torch.nn.Parameter
        is_plain = (type(obj) is torch.Tensor or is_parameter) and not obj.__dict__
        if is_plain and obj.layout is torch.strided and not obj.is_quantized:
            elements = as_memory(as_bytes(obj.detach().cpu()))
            facts = (tuple(obj.shape), obj.dtype, obj.requires_grad, is_parameter)
            return _rebuild, (*facts, pickle.PickleBuffer(elements))
        if obj.device.type != "cpu":
            # A subclass, or a tensor with attributes: its own way of pickling, but on the host.
            return obj.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _rebuild(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    elements: bytearray,
) -> torch.Tensor:
    """Makes a tensor out of its elements."""
    if elements:
        tensor = torch.frombuffer(elements, dtype=dtype).view(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def dump(obj: Any, purpose: str) -> torch.Tensor:
    """Pickles an object to a flat uint8 host tensor; errors name the purpose.

    Raises:
        MpxlaError: Some part cannot be pickled; the text names it.
    """
    try:
        return torch.frombuffer(pickled(obj), dtype=torch.uint8)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        path, part = unpicklable(obj, "obj")
        raise MpxlaError(
            f"{purpose}: {path}, {_show(part)}, cannot be pickled ({error}). Send data instead: "
            f"numbers, strings, tensors, and containers of them."
        ) from error


def restore(data: torch.Tensor, src: int, rank: int) -> Any:
    """Unpickles an object; the inverse of `dump`.

    Raises:
        MpxlaError: Its class cannot be found or built here.
    """
    try:
        return unpickled(data)
    except Exception as error:  # whatever the constructors of the user's classes raise
        raise MpxlaError(
            f"rank {rank} received an object of rank {src} that it cannot unpickle "
            f"({type(error).__name__}: {error}). Define its classes at the top level of a module "
            f"that every rank can import."
        ) from error


def unpickled(data: torch.Tensor) -> Any:
    """The object of a pickle: flat uint8 host tensor, from a rank that has proved to be one."""
    return pickle.loads(as_memory(data))


OBJECTS = Format("object", dump, restore)
"""Anything that can be pickled."""


def pickled(obj: Any) -> memoryview:
    """The pickle of an object; tensors in it as their own elements."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getbuffer()


Entry = tuple[str, Any]
"""A part of an object: how the user would write it, as in `obj['args'].lr`, and what is there."""


def innermost(
    entry: Entry, parts: Callable[[str, Any], Iterator[Entry]], is_bad: Callable[[Any], bool]
) -> Entry:
    """Descends to the innermost part of an object that makes trouble."""
    seen: set[int] = set()
    while id(entry[1]) not in seen:
        seen.add(id(entry[1]))
        entry = next((part for part in parts(*entry) if is_bad(part[1])), entry)
    return entry


def unpicklable(obj: Any, name: str) -> Entry:
    """The innermost part of an object of that name that cannot be pickled."""
    return innermost((name, obj), _parts, _fails)


def _parts(path: str, obj: Any) -> Iterator[Entry]:
    if isinstance(obj, dict):
        yield from ((f"{path}[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, list | tuple):
        yield from ((f"{path}[{index}]", value) for index, value in enumerate(obj))
    elif not isinstance(obj, type | Callable):
        attributes = getattr(obj, "__dict__", {})
        yield from ((f"{path}.{name}", value) for name, value in attributes.items())


def _fails(obj: Any) -> bool:
    try:
        pickled(obj)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        return True
    return False


def _show(obj: Any) -> str:
    text = repr(obj)
    return f"{text if len(text) <= 80 else text[:77] + '...'} of type {type(obj).__name__}"
