"""Operators that are written with others before a stage is differentiated.

Their derivatives in PyTorch look at values (an index by a mask), at how tensors lie in memory
(determinants, `as_strided`), or are operators that jax has no function for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpxla.stage.replacements import SHARED, strided_places

__all__ = ["REPLACEMENTS"]

_aten = torch.ops.aten


def _as_strided(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    """By places in memory, of tensors that lie in it without gaps."""
    places = strided_places(tensor, size, stride, offset)
    return tensor.flatten().index_select(0, places).reshape(size)


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **SHARED,
    _aten.as_strided.default: _as_strided,
}
