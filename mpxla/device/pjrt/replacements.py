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


def _index_put(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """`tensor[mask] = values`, with a value for every place of the mask, in their order.

    PyTorch raises where there are more or fewer values than places, which a program cannot: it
    gives not-a-number then.
    """
    (place, mask), *others = [(i, v) for i, v in enumerate(indices) if v is not None]
    is_mask = mask.dtype is torch.bool and mask.dim() > 0 and not others
    if not is_mask or not values.numel() or (values.numel() == 1 and not accumulate):
        return SHARED[_aten.index_put.default](tensor, indices, values, accumulate)
    flat = tensor.flatten(place, place + mask.dim() - 1)
    marks, after = mask.flatten(), flat.dim() - place - 1
    rows = values.to(tensor.dtype).reshape((1,) * (flat.dim() - values.dim()) + values.shape)
    count = rows.shape[place]
    numbers = (marks.cumsum(0) - 1).clamp(0, count - 1)
    chosen = rows.index_select(place, numbers).expand(flat.shape)
    if count > 1 and chosen.dtype.is_floating_point:
        chosen = torch.where(marks.sum() == count, chosen, torch.nan)
    marks = marks.reshape(-1, *(1,) * after)
    return torch.where(marks, flat + chosen if accumulate else chosen, flat).reshape(tensor.shape)


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **SHARED,
    _aten.index_put.default: _index_put,
    _aten.as_strided.default: _as_strided,
}
