"""Fake tensors: those of the host, made without asking their mode, and which of them share memory.

Their mode takes 30 times as long.
"""

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["fake_tensor", "storage_of"]


def fake_tensor(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> FakeTensor:
    """What `torch.empty_strided` gives on the host while the mode is on."""
    bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, bare, torch.device("cpu"))


def storage_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, as views do; fake ones have no address to compare."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
