"""Where tensors have their elements, and which of them share memory.

Fake tensors have no addresses: for these see `storage_of` in `fakes.py`.
"""

from collections.abc import Mapping

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

__all__ = ["Memory", "extent", "memory", "share_memory", "sharing"]

Memory = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


def memory(tensor: torch.Tensor) -> Memory | None:
    """Equal for tensors that read one memory alike; None where there is no address."""
    if tensor.layout is not torch.strided or is_functorch_wrapped_tensor(tensor):
        return None
    try:
        where = tensor.data_ptr()
    except RuntimeError:  # a transformation of torch computes with it
        return None
    return (where, tensor.dtype, tensor.shape, tensor.stride()) if where else None


def extent(where: Memory) -> tuple[int, int]:
    """The bytes between which the elements of a tensor lie."""
    first, dtype, shape, strides = where
    steps = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return first, first + (steps + 1) * dtype.itemsize


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors on the host may overlap."""
    if {one.device.type, other.device.type} != {"cpu"}:
        return one is other
    mine, theirs = memory(one), memory(other)
    if mine is None or theirs is None:
        return one is other
    (first, end), (start, last) = extent(mine), extent(theirs)
    return first < last and start < end


def sharing(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Names of tensors on the host that have elements in common, two by two."""
    placed = [(memory(t), name) for name, t in tensors.items() if t.device.type == "cpu"]
    found: list[tuple[str, str]] = []
    end, widest = 0, ""  # of all that begin before, the one that goes furthest
    for start, last, name in sorted((*extent(w), name) for w, name in placed if w is not None):
        # Columns of one matrix lie between each other, and share nothing.
        if start < end and (
            tensors[name].data_ptr() == tensors[widest].data_ptr()
            or (tensors[name].is_contiguous() and tensors[widest].is_contiguous())
        ):
            found.append((widest, name))
        if last > end:
            end, widest = last, name
    return found
