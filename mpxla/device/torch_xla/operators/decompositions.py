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
- Group norm and instance norm lose digits where means are large against deviations.
- `multilabel_margin_loss` counts what follows the end of the targets (that is torch's).
- `vdot`, `_weight_norm` and the derivative of `index_put` with a mask run on the host.
- Batch norm in training keeps the biased variance as running variance; torch keeps the unbiased.

`test_decompositions` fails when torch_xla no longer needs an entry.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table, get_decompositions

from mpxla.device.torch_xla.operators.arithmetic import ARITHMETIC
from mpxla.device.torch_xla.operators.linear_algebra import FACTORIZATIONS, SOLVERS
from mpxla.device.torch_xla.operators.normalization import group_norm, instance_norm, layer_norm
from mpxla.device.torch_xla.operators.order import ORDER_STATISTICS
from mpxla.device.torch_xla.operators.pooling import POOLINGS
from mpxla.device.torch_xla.operators.special import digamma, lgamma
from mpxla.device.torch_xla.operators.spectral import short_time_fourier

__all__ = ["CALLED_INSIDE", "DECOMPOSITIONS", "REPLACEMENTS"]

_aten = torch.ops.aten


def _torchs(operator: Any) -> Callable[..., Any]:
    """How torch writes an operator with others."""
    return decomposition_table[operator]


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


def _copy(old: torch.Tensor, new: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """An assignment to a part of a tensor; torch has no derivative for the operator itself."""
    return new.to(old.dtype).expand(old.shape)


def _index_put(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """`tensor[mask] = number`, whose derivative looks for the places of the mask on the host."""
    mask = indices[0]
    is_mask = len(indices) == 1 and mask is not None and mask.dtype is torch.bool
    if mask is None or not is_mask or accumulate or values.numel() != 1:
        return _aten.index_put.default(tensor, indices, values, accumulate)
    mask = mask.reshape(*mask.shape, *(1 for _ in range(tensor.dim() - mask.dim())))
    return torch.where(mask, values.to(tensor.dtype).reshape(()), tensor)


def _multilabel_margin_loss(
    tensor: torch.Tensor, target: torch.Tensor, reduction: int = 1
) -> torch.Tensor:
    """Targets [N, C] of a row end at its first -1; torch's own decomposition counts those after."""
    rows, labels = torch.atleast_2d(tensor), torch.atleast_2d(target)
    count = rows.shape[-1]
    is_label = (labels == -1).cumsum(-1) == 0  # [N, label]
    index = torch.where(is_label, labels, 0)
    classes = torch.arange(count, device=target.device)
    is_target = ((index[:, :, None] == classes) & is_label[:, :, None]).any(1)  # [N, class]
    margins = (1 - rows.gather(1, index)[:, :, None] + rows[:, None, :]).clamp_min(0)
    counts = is_label[:, :, None] & ~is_target[:, None, :]
    losses = torch.where(counts, margins, 0).sum((1, 2)) / count
    losses = losses if tensor.dim() == 2 else losses[0]
    return (losses, losses.mean(), losses.sum())[reduction]


def _vdot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left.conj() * right).sum()


def _weight_norm(direction: torch.Tensor, length: torch.Tensor, dim: int = 0) -> torch.Tensor:
    others = [d for d in range(direction.dim()) if d != dim % direction.dim()]
    return direction * (length / torch.linalg.vector_norm(direction, dim=others, keepdim=True))


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


def _grid_sampler(tensor: torch.Tensor, grid: torch.Tensor, *settings: Any) -> torch.Tensor:
    flat = tensor.dim() == 4
    function = _torchs(_aten.grid_sampler_2d.default) if flat else _aten.grid_sampler.default
    return function(tensor, grid, *settings)


def _std(
    tensor: torch.Tensor,
    dim: int | Sequence[int] | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
) -> torch.Tensor:
    if isinstance(dim, bool):  # the overload without dimensions: (tensor, unbiased)
        dim, unbiased = None, dim
    return _aten.std.correction(tensor, dim, correction=int(unbiased), keepdim=keepdim)


def _channel_shuffle(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    split = tensor.unflatten(1, (groups, tensor.shape[1] // groups))
    return split.transpose(1, 2).reshape(tensor.shape)


def _cdist(
    left: torch.Tensor, right: torch.Tensor, p: float = 2.0, compute_mode: int | None = None
) -> torch.Tensor:
    """Distances [..., P, R] of points [..., P, M] and [..., R, M]."""
    return _norm_with_finite_slope(left.unsqueeze(-2) - right.unsqueeze(-3), p)


def _pdist(points: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """Distances of all pairs of points [N, M], as [N (N - 1) / 2]."""
    first, second = torch.triu_indices(len(points), len(points), 1, device=points.device)
    apart = points.index_select(0, first) - points.index_select(0, second)
    return _norm_with_finite_slope(apart, p)


def _norm_with_finite_slope(vectors: torch.Tensor, p: float) -> torch.Tensor:
    """The p-norm over the last dimension; its gradient at zero is zero."""
    if p == 0:
        return (vectors != 0).to(vectors.dtype).sum(-1)
    if p == 1:
        return vectors.abs().sum(-1)
    if p == torch.inf:
        return vectors.abs().amax(-1)
    total = (vectors * vectors if p == 2 else _power(vectors.abs(), p)).sum(-1)
    return _power(total, 1 / p)


def _power(values: torch.Tensor, exponent: float) -> torch.Tensor:
    """values ** exponent for what is not negative, with slope zero at zero."""
    is_zero = values == 0
    return torch.where(is_zero, 0, torch.where(is_zero, 1, values) ** exponent)


def _repeat_interleave(
    tensor: torch.Tensor,
    repeats: torch.Tensor,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> torch.Tensor:
    """With a size that is known; without one, the shape would depend on values."""
    if dim is None:
        tensor, dim = tensor.flatten(), 0
    if repeats.numel() == 1:
        repeats = repeats.reshape(1).expand(tensor.shape[dim])
    if output_size is None:
        return _aten.repeat_interleave.self_Tensor(tensor, repeats, dim)
    places = torch.arange(output_size, device=tensor.device)
    return tensor.index_select(dim, (places[:, None] >= repeats.cumsum(0)).sum(1))


def _multinomial(
    weights: torch.Tensor, count: int, replacement: bool = False, *, generator: Any = None
) -> torch.Tensor:
    """Without replacement: the first in a race of exponential times, as torch does it."""
    if replacement:
        return _aten.multinomial.default(weights, count, True)
    times = _aten.exponential.default(torch.empty_like(weights))
    return (weights / times).topk(count).indices


def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = -1,
) -> tuple[torch.Tensor, ...]:
    """Sums, means or maxima of rows; the other three results are what derivatives would read."""
    offsets = offsets[:-1] if include_last_offset else offsets
    count, num_bags = indices.shape[0], offsets.shape[0]
    places = torch.arange(count, device=indices.device)
    bag = (places[:, None] >= offsets).sum(1) - 1  # [indices]
    is_in = bag[:, None] == torch.arange(num_bags, device=indices.device)  # [indices, bags]
    if padding_idx is not None:
        padding = padding_idx + weight.shape[0] if padding_idx < -1 else padding_idx
        is_in = is_in & (indices != padding)[:, None]
    sizes = is_in.sum(0)
    rows = weight.index_select(0, indices)
    if mode == 2:
        masked = torch.where(is_in[:, :, None], rows.detach()[:, None, :], -torch.inf)
        first = masked.argmax(0)  # [bags, D]
        result = torch.where(sizes[:, None] > 0, rows.gather(0, first), 0)
    else:
        shares = is_in.to(rows.dtype)
        if per_sample_weights is not None:
            shares = shares * per_sample_weights[:, None]
        if mode == 1:
            shares = shares / sizes.clamp_min(1)
        result = shares.mT @ rows
    return result, bag, sizes, sizes


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
    **SOLVERS,
    _aten._embedding_bag.default: _embedding_bag,
    _aten._weight_norm.default: _weight_norm,
    _aten.affine_grid_generator.default: _torchs(_aten.affine_grid_generator.default),
    _aten.cdist.default: _cdist,
    _aten.channel_shuffle.default: _channel_shuffle,
    _aten.pdist.default: _pdist,
    _aten.copy.default: _copy,
    _aten.histc.default: _histc,
    _aten.index_put.default: _index_put,
    _aten.kl_div.default: _kl_div,
    _aten.embedding_bag.default: _embedding_bag,
    _aten.embedding_bag.padding_idx: _embedding_bag,
    _aten.cross.default: _cross,
    _aten.diag.default: _diag,
    _aten.grid_sampler.default: _grid_sampler,
    _aten.grid_sampler_2d.default: _torchs(_aten.grid_sampler_2d.default),
    _aten.group_norm.default: group_norm,
    _aten.instance_norm.default: instance_norm,
    _aten.layer_norm.default: layer_norm,
    _aten.multilabel_margin_loss.default: _multilabel_margin_loss,
    _aten.multinomial.default: _multinomial,
    _aten.repeat_interleave.self_Tensor: _repeat_interleave,
    _aten.selu.default: _selu,
    _aten.std.default: _std,
    _aten.std.dim: _std,
    _aten.stft.default: short_time_fourier,
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
    _aten.copy.default: _copy,
    _aten.fill.Tensor: _fill,
    **ARITHMETIC,
    **FACTORIZATIONS,
    _aten.digamma.default: digamma,
    _aten.lgamma.default: lgamma,
    **get_decompositions(
        [
            *_NO_KERNEL,
            _aten.elu_backward.default,
            _aten.glu_backward.default,
            _aten.native_dropout.default,
            _aten.native_dropout_backward.default,
            _aten._native_batch_norm_legit_functional.default,
            _aten.native_batch_norm_backward.default,
        ]
    ),
}
