"""Operators rewritten while a stage is lowered, because torch_xla 2.9 gets them wrong or slow.

- `fill` with a tensor reads the value on the host.
- `unfold` (images to patches) and its derivative have no lowering.
- `native_dropout` calls its mask bool, and gives floats that are scaled already: a backward that is
  a program of its own reads garbage.
- The derivative of `elu` (and of `selu`, `celu`) is computed as if its input were its result.
- `randperm` does not follow from the device's seed.
- `copy`, a part of a tensor that was assigned to, has no derivative (that is torch's).
- Batch norm in training keeps the biased variance as running variance; torch keeps the unbiased.

`test_decompositions` fails when torch_xla no longer needs an entry.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions

__all__ = ["DECOMPOSITIONS", "REPLACEMENTS"]

_aten = torch.ops.aten


def _fill(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch_xla 2.9 fills with a Python number, which it reads from the value tensor."""
    return value.to(tensor.dtype).expand(tensor.shape)


def _unfold(tensor: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """Windows of `size` along a dimension, as a new last dimension; by indices."""
    count = (tensor.shape[dimension] - size) // step + 1
    starts = torch.arange(count, device=tensor.device) * step
    index = starts[:, None] + torch.arange(size, device=tensor.device)
    dimension %= tensor.dim()
    windows = tensor.index_select(dimension, index.flatten())
    return windows.unflatten(dimension, (count, size)).movedim(dimension + 1, -1)


def _randperm(
    count: int, *, dtype: torch.dtype = torch.int64, device: torch.device | None = None
) -> torch.Tensor:
    """Order of random numbers; the permutation of torch_xla 2.9 does not follow from the seed."""
    return torch.rand(count, device=device).argsort().to(dtype)


def _copy(old: torch.Tensor, new: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """An assignment to a part of a tensor; torch has no derivative for the operator itself."""
    return new.to(old.dtype).expand(old.shape)


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    _aten.copy.default: _copy,
    _aten.unfold.default: _unfold,
    _aten.randperm.default: _randperm,
}
"""Replaced before differentiation, so that the derivative is that of the replacement."""

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten.fill.Tensor: _fill,
    **get_decompositions(
        [
            _aten.elu_backward.default,
            _aten.native_dropout.default,
            _aten.native_dropout_backward.default,
            _aten._native_batch_norm_legit_functional.default,
            _aten.native_batch_norm_backward.default,
        ]
    ),
}
