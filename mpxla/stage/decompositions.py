"""Operators rewritten while a stage is lowered, because torch_xla 2.9 gets them wrong or slow.

- `fill` with a tensor reads the value on the host.
- `unfold` (images to patches) and its derivative have no lowering.
- `native_dropout` calls its mask bool, and gives floats that are scaled already: a backward that is
  a program of its own reads garbage.
- Layer norm saves three values of its input's size for the backward (`normalization.py`).
- The derivative of `elu` (and of `selu`, `celu`) is computed as if its input were its result.
- `kl_div` and `selu` have no derivative (see `lacks_derivative`); that of `glu` runs on the host.
- Adaptive pooling to one value is traced with `as_strided_` where strides look like channels last.
- `histc` has no lowering; with given bounds it is a count of numbers.
- `randperm` does not follow from the device's seed.
- `copy`, a part of a tensor that was assigned to, has no derivative (that is torch's).
- `vdot`, `_weight_norm` and the derivative of `index_put` with a mask run on the host.
- Batch norm in training keeps the biased variance as running variance; torch keeps the unbiased.

`test_decompositions` fails when torch_xla no longer needs an entry.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions

from mpxla.stage.normalization import layer_norm

__all__ = ["DECOMPOSITIONS", "REPLACEMENTS", "lacks_derivative"]

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


def _vdot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left.conj() * right).sum()


def _weight_norm(direction: torch.Tensor, length: torch.Tensor, dim: int = 0) -> torch.Tensor:
    others = [d for d in range(direction.dim()) if d != dim % direction.dim()]
    return direction * (length / torch.linalg.vector_norm(direction, dim=others, keepdim=True))


def _adaptive_avg_pool1d(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    if list(size) == [1]:
        return tensor.mean(dim=-1, keepdim=True)
    return _aten.adaptive_avg_pool1d.default(tensor, size)


def _adaptive_avg_pool2d(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    if list(size) == [1, 1]:
        return tensor.mean(dim=(-1, -2), keepdim=True)
    return _aten.adaptive_avg_pool2d.default(tensor, size)


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


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    _aten._weight_norm.default: _weight_norm,
    _aten.adaptive_avg_pool1d.default: _adaptive_avg_pool1d,
    _aten.adaptive_avg_pool2d.default: _adaptive_avg_pool2d,
    _aten.copy.default: _copy,
    _aten.histc.default: _histc,
    _aten.index_put.default: _index_put,
    _aten.kl_div.default: _kl_div,
    _aten.layer_norm.default: layer_norm,
    _aten.selu.default: _selu,
    _aten.vdot.default: _vdot,
    _aten.unfold.default: _unfold,
    _aten.randperm.default: _randperm,
}
"""Replaced before differentiation, so that the derivative is that of the replacement."""


def lacks_derivative(target: Any) -> bool:
    """Whether autograd would pass over an operator on the device, and leave gradients at zero.

    torch_xla computes some operators that torch composes of others by itself, so that their parts
    are traced below autograd.
    """
    if target in REPLACEMENTS or not isinstance(target, torch._ops.OpOverload):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = target.name()
    is_composed = has_kernel(name, "CompositeImplicitAutograd")
    return is_composed and has_kernel(name, "XLA") and not has_kernel(name, "AutogradXLA")


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten.fill.Tensor: _fill,
    **get_decompositions(
        [
            _aten.elu_backward.default,
            _aten.glu_backward.default,
            _aten.native_dropout.default,
            _aten.native_dropout_backward.default,
            _aten._native_batch_norm_legit_functional.default,
            _aten.native_batch_norm_backward.default,
        ]
    ),
}
