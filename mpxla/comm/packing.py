"""Several tensors as one run of bytes, and back without copying.

A boundary between two stages carries many tensors per microbatch, and one large message is cheaper
than many small ones. Both ends know shapes and dtypes beforehand, so the bytes hold nothing else:

    | tensor 0 | pad | tensor 1 | pad | ... | tensor n |        every tensor starts at 64 k

A message of one tensor is that tensor's own bytes. Pure functions; they know of no transport.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, cast

import torch

__all__ = [
    "ALIGNMENT_BYTES",
    "Layout",
    "Spec",
    "as_bytes",
    "as_memory",
    "copy_to_host",
    "describe",
    "layout",
    "pack",
    "unpack",
]

ALIGNMENT_BYTES = 64
"""Torch's own alignment of host tensors; enough for every dtype and for vector instructions."""


class Spec(Protocol):
    """Anything with a shape and a dtype: a spec of a stage, a tensor, a fake tensor."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of the dims."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        ...


class Layout(NamedTuple):
    """Where the tensors of one message lie."""

    offsets: tuple[int, ...]
    """First byte of every tensor."""
    num_bytes: int
    """Size of the message."""
    text: str
    """The specs in words, as in `float32[4, 16], int64[]`."""
    digest: bytes
    """Eight bytes that two ends compare to find that they disagree about the specs."""


_Key = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def layout(specs: Iterable[Spec]) -> Layout:
    """Computes where the tensors of a message lie."""
    return _layout(tuple((tuple(spec.shape), spec.dtype) for spec in specs))


@lru_cache(maxsize=1024)
def _layout(key: _Key) -> Layout:
    offsets, end = [], 0
    for shape, dtype in key:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(start)
        end = start + math.prod(shape) * dtype.itemsize
    text = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in key)
    return Layout(tuple(offsets), end, text, blake2b(text.encode(), digest_size=8).digest())


def describe(specs: Iterable[Spec]) -> str:
    """Returns specs in words, for error texts: `float32[4, 16], int64[]`."""
    return layout(specs).text


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in host memory, shared if it is there already."""
    return tensor.detach().cpu()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a host tensor as a flat uint8 tensor [num_bytes].

    A view where the tensor is contiguous, else a copy.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single element may have any stride (that of `expand`), which a flat view would keep.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def as_memory(data: torch.Tensor) -> memoryview:
    """Returns the memory of a flat uint8 host tensor, for functions that read or write bytes."""
    return memoryview(cast(Any, data.numpy()))


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Puts host tensors of any shapes, dtypes and strides into one message.

    Returns:
        Flat uint8 tensor [num_bytes]. With one contiguous tensor it is a view of it.
    """
    if len(tensors) == 1:
        return as_bytes(tensors[0])
    offsets, num_bytes, _, _ = layout(tensors)
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    end = 0
    for tensor, start, view in zip(tensors, offsets, unpack(buffer, tensors), strict=True):
        buffer[end:start].zero_()
        view.copy_(tensor.detach())
        end = start + tensor.numel() * tensor.dtype.itemsize
    return buffer


def unpack(buffer: torch.Tensor, specs: Sequence[Spec]) -> list[torch.Tensor]:
    """Finds the tensors of a message, as views of it; the inverse of `pack`.

    The buffer is a flat uint8 tensor [num_bytes] whose first byte is aligned to 64 bytes.
    """
    offsets, num_bytes, text, _ = layout(specs)
    assert buffer.numel() == num_bytes, f"{buffer.numel()} bytes for {text}, {num_bytes} bytes"
    views = []
    for spec, start in zip(specs, offsets, strict=True):
        size = math.prod(spec.shape) * spec.dtype.itemsize
        views.append(buffer[start : start + size].view(spec.dtype).view(tuple(spec.shape)))
    return views
