"""Operators that are written with others before a stage is differentiated.

Their derivatives in PyTorch look at values (an index by a mask), at how tensors lie in memory
(determinants, `as_strided`), or are operators that jax has no function for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpxla.device.torch_xla.operators.decompositions import REPLACEMENTS as _ALL
from mpxla.errors import LoweringError

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


_SHARED = (
    *(_aten._embedding_bag.default, _aten.embedding_bag.default, _aten.embedding_bag.padding_idx),
    *(_aten._weight_norm.default, _aten.cdist.default, _aten.pdist.default, _aten.copy.default),
    *(_aten.index_put.default, _aten.grid_sampler.default, _aten.grid_sampler_2d.default),
    *(_aten.affine_grid_generator.default, _aten.channel_shuffle.default, _aten.stft.default),
    *(_aten.multilabel_margin_loss.default, _aten.repeat_interleave.self_Tensor),
    *(_aten.det.default, _aten.inverse.default, _aten.linalg_det.default, _aten.qr.default),
    *(_aten.linalg_inv.default, _aten.linalg_inv_ex.default, _aten.linalg_slogdet.default),
    *(_aten.linalg_solve.default, _aten.linalg_solve_ex.default, _aten.logdet.default),
    *(_aten.slogdet.default, _aten.svd.default),
)

REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **{operator: _ALL[operator] for operator in _SHARED},
    _aten.as_strided.default: _as_strided,
}
