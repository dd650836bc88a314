"""Operators that are written with others before a stage is differentiated.

Their derivatives in PyTorch look at values (an index by a mask), at how tensors lie in memory
(determinants, `as_strided`), or are operators that jax has no function for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpxla.errors import LoweringError
from mpxla.stage.replacements import SHARED

__all__ = ["REPLACEMENTS"]

_aten = torch.ops.aten


def _as_strided(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    """By places in memory, of tensors that lie in it without gaps."""
    if not tensor.is_contiguous():
        raise LoweringError(
            "as_strided of a tensor that is not contiguous: call contiguous() before it"
        )
    places = torch.full((), offset or 0, dtype=torch.int64, device=tensor.device)
    for count, step in zip(size, stride, strict=True):
        places = places[..., None] + torch.arange(count, device=tensor.device) * step
    return tensor.flatten().index_select(0, places.flatten()).reshape(size)


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **SHARED,
    _aten.as_strided.default: _as_strided,
}
