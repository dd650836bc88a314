"""Operators rewritten while a stage is lowered, because torch_xla 2.9 gets them wrong or slow.

- `fill` with a tensor reads the value on the host.
- `unfold` (images to patches) and its derivative have no lowering.
- `native_dropout` calls its mask bool, and gives floats that are scaled already: a backward that is
  a program of its own reads garbage.
- Layer norm saves three values of its input's size for the backward (`normalization.py`).
- The derivative of `elu` (and of `selu`, `celu`) is computed as if its input were its result.
- `kl_div` and `selu` have no derivative in torch_xla; that of `glu` runs on the host.
- `histc` has no lowering; with given bounds it is a count of numbers.
- `randperm` does not follow from the device's seed.
- `copy`, a part of a tensor that was assigned to, has no derivative (that is torch's), and on the
  device it writes into its first argument.
- `nll_loss` of one sample without a batch ends the process.
- `index_select`, `index_add`, `index_copy` and `index_fill` end the process where the index comes
  out of `sort` or `topk`.
- Group norm and instance norm lose digits where means are large against deviations.
- `multilabel_margin_loss` counts what follows the end of the targets (that is torch's).
- `vdot`, `_weight_norm` and the derivative of `index_put` with a mask run on the host.
- Batch norm in training keeps the biased variance as running variance; torch keeps the unbiased.

`test_decompositions` fails when torch_xla no longer needs an entry.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions

from mpxla.device.torch_xla.operators.arithmetic import ARITHMETIC
from mpxla.device.torch_xla.operators.linear_algebra import FACTORIZATIONS
from mpxla.device.torch_xla.operators.normalization import group_norm, instance_norm, layer_norm
from mpxla.device.torch_xla.operators.order import ORDER_STATISTICS
from mpxla.device.torch_xla.operators.pooling import POOLINGS
from mpxla.device.torch_xla.operators.special import digamma, lgamma
from mpxla.graph.gradients import copied
from mpxla.stage.replacements import SHARED

__all__ = ["CALLED_INSIDE", "DECOMPOSITIONS", "REPLACEMENTS"]

_aten = torch.ops.aten


def _fill(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch_xla 2.9 fills with a Python number, which it reads from the value tensor."""
    return value.to(tensor.dtype).expand(tensor.shape)


def _unfold(tensor: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """Windows of `size` along a dimension, as a new last dimension; by indices."""
    if tensor.dim() == 0:
        return tensor.reshape(1)[:size]
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


def _vdot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left.conj() * right).sum()


def _histc(tensor: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Counts of the values in equal bins; the last one holds its upper bound as well."""
    if min >= max:  # the bounds are those of the values
        return _aten.histc.default(tensor, bins, min, max)
    place = ((tensor - min) * (bins / (max - min))).floor().clamp(0, bins - 1).to(torch.int64)
    counts = ((tensor >= min) & (tensor <= max)).to(tensor.dtype)
    zeros = torch.zeros(bins, dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter_add(0, place.flatten(), counts.flatten())


def _selu(tensor: torch.Tensor) -> torch.Tensor:
    return _aten.elu.default(tensor, 1.6732632423543772, 1.0507009873554805)


def _logit(tensor: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """With a bound, torch_xla 2.9 gives NaN for values beyond it."""
    share = tensor if eps is None else tensor.clamp(eps, 1 - eps)
    return (share / (1 - share)).log()


def _kl_div(
    tensor: torch.Tensor, target: torch.Tensor, reduction: int = 1, *, log_target: bool = False
) -> torch.Tensor:
    if log_target:
        points = target.exp() * (target - tensor)
    else:
        points = torch.xlogy(target, target) - target * tensor
    return (points, points.mean(), points.sum())[reduction]


def _with_a_dimension(operator: Any) -> Callable[..., torch.Tensor]:
    """Also for tensors without dimensions, whose dimension 0 torch_xla does not find."""

    def call(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if tensor.dim():
            return operator(tensor, *arguments, **keywords)
        row = [
            a.reshape(1) if isinstance(a, torch.Tensor) and not a.dim() else a for a in arguments
        ]
        return operator(tensor.reshape(1), *row, **keywords).reshape(())

    return call


def _cross(left: torch.Tensor, right: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    if dim is None:
        dim = next(d for d, size in enumerate(left.shape) if size == 3)
    return _aten.linalg_cross.default(left, right, dim=dim)


def _diag(tensor: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    is_vector = tensor.dim() == 1
    return tensor.diag_embed(diagonal) if is_vector else tensor.diagonal(diagonal).clone()


def _std(
    tensor: torch.Tensor,
    dim: int | Sequence[int] | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
) -> torch.Tensor:
    if isinstance(dim, bool):  # the overload without dimensions: (tensor, unbiased)
        dim, unbiased = None, dim
    return _aten.std.correction(tensor, dim, correction=int(unbiased), keepdim=keepdim)


def _multinomial(
    weights: torch.Tensor, count: int, replacement: bool = False, *, generator: Any = None
) -> torch.Tensor:
    """Without replacement: the first in a race of exponential times, as torch does it."""
    if replacement:
        return _aten.multinomial.default(weights, count, True)
    times = _aten.exponential.default(torch.empty_like(weights))
    return (weights / times).topk(count).indices


_NEED_A_DIMENSION = (
    _aten.index_add.default,
    _aten.index_copy.default,
    _aten.index_fill.int_Scalar,
    _aten.index_select.default,
    _aten.logsumexp.default,
)

REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **{operator: _with_a_dimension(operator) for operator in _NEED_A_DIMENSION},
    **ORDER_STATISTICS,
    **POOLINGS,
    **SHARED,
    _aten.histc.default: _histc,
    _aten.kl_div.default: _kl_div,
    _aten.logit.default: _logit,
    _aten.cross.default: _cross,
    _aten.diag.default: _diag,
    _aten.group_norm.default: group_norm,
    _aten.instance_norm.default: instance_norm,
    _aten.layer_norm.default: layer_norm,
    _aten.multinomial.default: _multinomial,
    # Torch's derivative on this device takes mean and deviation for constants.
    **get_decompositions([_aten.native_group_norm.default]),
    # With a factor and a number of another dtype, its program fails in torch_xla 2.9, or waits.
    **get_decompositions([_aten.rsub.Tensor]),
    _aten.selu.default: _selu,
    _aten.std.default: _std,
    _aten.std.dim: _std,
    _aten.vdot.default: _vdot,
    _aten.unfold.default: _unfold,
    _aten.randperm.default: _randperm,
}
"""Replaced before differentiation, so that the derivative is that of the replacement."""


CALLED_INSIDE = tuple(
    (operator, REPLACEMENTS[operator])
    for operator in (
        *(_aten.cross.default, _aten.diag.default, _aten.inverse.default, _aten.logdet.default),
        *(_aten.qr.default, _aten.std.default, _aten.std.dim, _aten.svd.default),
        _aten.vdot.default,
    )
)
"""Replacements that do not call what they replace: they also stand where another operator calls it,
as `diagflat` calls `diag` (see `composition.py`)."""

_NO_KERNEL = (
    _aten._addmm_activation.default,
    _aten._chunk_cat.default,
    _aten._reshape_alias.default,
    _aten._upsample_nearest_exact1d.default,
    _aten._upsample_nearest_exact2d.default,
    _aten._upsample_nearest_exact3d.default,
    _aten.addmv.default,
    _aten.col2im.default,
    _aten.heaviside.default,
    _aten.huber_loss.default,
    _aten.huber_loss_backward.default,
    _aten.im2col.default,
    _aten.isin.Scalar_Tensor,
    _aten.isin.Tensor_Scalar,
    _aten.isin.Tensor_Tensor,
    _aten.isposinf.default,
    _aten.linalg_cross.default,
    _aten.logaddexp.default,
    _aten.logaddexp2.default,
    _aten.logit_backward.default,
    _aten.multi_margin_loss.default,
    _aten.nansum.default,
    _aten.renorm.default,
    _aten.rrelu_with_noise_functional.default,
    _aten.sinc.default,
    _aten.special_entr.default,
    _aten.special_log_ndtr.default,
    _aten.special_xlog1py.default,
    _aten.tril_indices.default,
    _aten.triu_indices.default,
    _aten.unfold_backward.default,
    _aten.upsample_bicubic2d.default,
    _aten.upsample_linear1d.default,
    _aten.upsample_nearest1d.default,
    _aten.upsample_nearest3d.default,
    _aten.cauchy.default,
    _aten.geometric.default,
    _aten.log_normal.default,
)
"""Operators without a kernel of torch_xla's that torch writes with others."""

_ALONG = (
    *(_aten.index_select.default, _aten.index_add.default, _aten.index_copy.default),
    *(_aten.index_fill.int_Scalar, _aten.index_fill.int_Tensor),
)
"""Written by advanced indexing: where their index comes out of `sort` or `topk`, they take the
shape of the whole result of those, a pair, for that of the index."""


def _nll_loss(
    tensor: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
) -> Any:
    """Of one sample [C], for which torch_xla ends the process; others are left to it."""
    if tensor.dim() > 1:
        return NotImplemented
    rows = tensor.unsqueeze(0), target.reshape(1)
    loss, total = _aten.nll_loss_forward.default(*rows, weight, reduction, ignored)
    return loss.reshape(()), total


def _nll_loss_backward(
    gradient: torch.Tensor, tensor: torch.Tensor, target: torch.Tensor, *settings: Any
) -> Any:
    if tensor.dim() > 1:
        return NotImplemented
    weight, reduction, *rest = settings
    gradient = gradient.reshape(1) if reduction == 0 else gradient
    rows = tensor.unsqueeze(0), target.reshape(1)
    found = _aten.nll_loss_backward.default(gradient, *rows, weight, reduction, *rest)
    return found.squeeze(0)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten.nll_loss_forward.default: _nll_loss,
    _aten.nll_loss_backward.default: _nll_loss_backward,
    _aten.copy.default: copied,
    _aten.fill.Tensor: _fill,
    **ARITHMETIC,
    **FACTORIZATIONS,
    _aten.digamma.default: digamma,
    _aten.lgamma.default: lgamma,
    **get_decompositions(
        [
            *_NO_KERNEL,
            *_ALONG,
            _aten.elu_backward.default,
            _aten.glu_backward.default,
            _aten.native_dropout.default,
            _aten.native_dropout_backward.default,
            _aten._native_batch_norm_legit.no_stats,  # its kernel gives 16 bits as float32
            _aten._native_batch_norm_legit_functional.default,
            _aten.native_batch_norm_backward.default,
        ]
    ),
}
