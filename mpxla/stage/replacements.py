"""Operators that are written with others before a stage is differentiated, for every backend.

Their derivatives in PyTorch look at values (an index by a mask), are none (an assignment to a part
of a tensor), count wrongly (`multilabel_margin_loss`), or call operators that devices lack.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table

from mpxla.errors import LoweringError
from mpxla.graph.gradients import copied
from mpxla.stage.solvers import SOLVERS
from mpxla.stage.spectral import short_time_fourier

__all__ = ["SHARED", "_strided_places"]

_aten = torch.ops.aten
_TORCHS: dict[Any, Callable[..., Any]] = {
    operator: decomposition_table[operator]
    for operator in (_aten.affine_grid_generator.default, _aten.grid_sampler_2d.default)
}
"""Operators that torch writes with others."""


def _index_put(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """`tensor[mask] = values`, whose derivative looks for the places of the mask on the host.

    Whole dimensions may come before the mask: `tensor[:, mask] = values`. With several values,
    each is that of one place, in their order. PyTorch raises where there are more or fewer of them
    than places, which a program cannot: it gives not-a-number then.
    """
    given = [(i, index) for i, index in enumerate(indices) if index is not None]
    place, mask = given[0]
    is_mask = mask.dtype is torch.bool and mask.dim() > 0 and len(given) == 1
    if not is_mask or not values.numel():
        return _aten.index_put.default(tensor, indices, values, accumulate)
    values, after = values.to(tensor.dtype), tensor.dim() - place - mask.dim()
    if values.numel() == 1:
        chosen = values.reshape(())
    else:
        rows = values.reshape((1,) * (place + 1 + after - values.dim()) + values.shape)
        chosen = _for_places(rows, place, mask.flatten())
        if mask.dim() > 1:
            sizes = (mask.numel(), *tensor.shape[tensor.dim() - after :])
            chosen = chosen.expand(*tensor.shape[:place], *sizes).reshape(tensor.shape)
    mask = mask.reshape(*mask.shape, *(1 for _ in range(after)))
    return torch.where(mask, tensor + chosen if accumulate else chosen, tensor)


def _for_places(values: torch.Tensor, dim: int, marks: torch.Tensor) -> torch.Tensor:
    """Values along a dimension in the places that are marked; what is in others is nothing."""
    count = values.shape[dim]
    if count == 1:
        return values
    chosen = values.index_select(dim, (marks.cumsum(0) - 1).clamp(0, count - 1))
    if not chosen.dtype.is_floating_point:
        return chosen
    return torch.where(marks.sum() == count, chosen, torch.nan)


def _range(
    start: float,
    end: float,
    step: float = 1,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> torch.Tensor:
    """`torch.range`, which has its end; devices lack the operator."""
    numbers = torch.arange(int((end - start) / step) + 1, dtype=torch.float64, device=device)
    return (start + step * numbers).to(dtype or torch.get_default_dtype())


def _strided_places(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> torch.Tensor:
    """Where `as_strided` reads the elements of a tensor that lies in memory without gaps.

    Returns:
        Flat places, [elements].
    """
    if not tensor.is_contiguous():
        raise LoweringError(
            "as_strided of a tensor that is not contiguous: call contiguous() before it"
        )
    places = torch.full((), offset or 0, dtype=torch.int64, device=tensor.device)
    for count, step in zip(size, stride, strict=True):
        places = places[..., None] + torch.arange(count, device=tensor.device) * step
    return places.flatten()


def _as_strided(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    """By places in memory, of tensors without gaps; PyTorch's derivative asks how they lie."""
    places = _strided_places(tensor, size, stride, offset)
    return tensor.flatten().index_select(0, places).reshape(size)


def _as_strided_scatter(
    tensor: torch.Tensor,
    source: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
) -> torch.Tensor:
    """What writes to such a view become, `fill_diagonal_` for one.

    Its derivative in PyTorch 2.9 gives a tensor the gradient of what was written over, and none of
    what stays.
    """
    places = _strided_places(tensor, size, stride, offset)
    written = tensor.flatten().scatter(0, places, source.to(tensor.dtype).flatten())
    return written.reshape(tensor.shape)


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


def _weight_norm(direction: torch.Tensor, length: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The length is one for each place of a dimension; -1 stands for one length of all."""
    others = [d for d in range(direction.dim()) if d != dim]
    return direction * (length / torch.linalg.vector_norm(direction, dim=others, keepdim=True))


def _grid_sampler(tensor: torch.Tensor, grid: torch.Tensor, *settings: Any) -> torch.Tensor:
    flat = tensor.dim() == 4
    function = _TORCHS[_aten.grid_sampler_2d.default] if flat else _aten.grid_sampler.default
    return function(tensor, grid, *settings)


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


SHARED: dict[Any, Callable[..., Any]] = {
    **SOLVERS,
    _aten._embedding_bag.default: _embedding_bag,
    _aten._weight_norm.default: _weight_norm,
    _aten.as_strided.default: _as_strided,
    _aten.as_strided_scatter.default: _as_strided_scatter,
    **_TORCHS,
    _aten.cdist.default: _cdist,
    _aten.channel_shuffle.default: _channel_shuffle,
    _aten.pdist.default: _pdist,
    _aten.copy.default: copied,
    _aten.index_put.default: _index_put,
    _aten.range.default: _range,
    _aten.range.step: _range,
    _aten.embedding_bag.default: _embedding_bag,
    _aten.embedding_bag.padding_idx: _embedding_bag,
    _aten.grid_sampler.default: _grid_sampler,
    _aten.multilabel_margin_loss.default: _multilabel_margin_loss,
    _aten.repeat_interleave.self_Tensor: _repeat_interleave,
    _aten.stft.default: short_time_fourier,
}
"""Operator -> what stands for it."""
