"""Elementwise operators and products of which torch_xla 2.9 lowers only the plain forms."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["ARITHMETIC"]

_aten = torch.ops.aten


def _addmm(
    added: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """beta * added + alpha * left @ right; the plain form is the device's own."""
    if beta == 1 and alpha == 1:
        return NotImplemented
    return _scaled_sum(added, left @ right, beta, alpha)


def _addbmm(
    added: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    return _scaled_sum(added, (left @ right).sum(0), beta, alpha)


def _scaled_sum(
    added: torch.Tensor, product: torch.Tensor, beta: float, alpha: float
) -> torch.Tensor:
    """With beta = 0, nothing of `added` counts, not-a-numbers neither."""
    product = product * alpha
    return product if beta == 0 else added * beta + product


def _angle(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.atan2(tensor.imag, tensor.real)
    return torch.where(tensor.isnan(), tensor, torch.where(tensor < 0, torch.pi, 0.0))


def _clamp(
    tensor: torch.Tensor, low: torch.Tensor | None = None, high: torch.Tensor | None = None
) -> torch.Tensor:
    """Bounds of other shapes are spread, which the device forgets."""
    if low is not None:
        tensor = torch.maximum(tensor, low.to(tensor.dtype))
    return tensor if high is None else torch.minimum(tensor, high.to(tensor.dtype))


def _clamp_max(tensor: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return _clamp(tensor, None, high)


def _signbit(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor < 0
    return (tensor < 0) | ((tensor == 0) & (1 / tensor < 0))


def _copysign(tensor: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    return torch.where(_signbit(signs), -tensor.abs(), tensor.abs())


def _exp2(tensor: torch.Tensor) -> torch.Tensor:
    return torch.pow(2.0, tensor)


def _hypot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(left * left + right * right)


def _aminmax(
    tensor: torch.Tensor, *, dim: int | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own decomposition leaves out the dimensions, which the device takes for none."""
    dims = list(range(tensor.dim())) if dim is None else [dim]
    if not tensor.dim():
        return tensor.clone(), tensor.clone()
    return tensor.amin(dims, keepdim), tensor.amax(dims, keepdim)


def _extreme(operator: Any) -> Callable[..., torch.Tensor]:
    """`amin` and `amax` over all dimensions, which the device takes for none."""

    def over_all(
        tensor: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False
    ) -> torch.Tensor:
        if dim or not tensor.dim():
            return NotImplemented
        return operator(tensor, list(range(tensor.dim())), keepdim)

    return over_all


def _count_nonzero(tensor: torch.Tensor, dim: int | Sequence[int] | None = None) -> torch.Tensor:
    dims = [dim] if isinstance(dim, int) else list(dim or range(tensor.dim()))
    return (tensor != 0).to(torch.int64).sum(dims) if tensor.dim() else (tensor != 0).long()


def _bucketize(
    values: torch.Tensor,
    boundaries: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
) -> torch.Tensor:
    """How many boundaries are below each value (or equal to it, if `right`)."""
    is_below = boundaries <= values[..., None] if right else boundaries < values[..., None]
    return is_below.sum(-1).to(torch.int32 if out_int32 else torch.int64)


ARITHMETIC: dict[Any, Callable[..., Any]] = {
    _aten.addbmm.default: _addbmm,
    _aten.addmm.default: _addmm,
    _aten.amax.default: _extreme(_aten.amax.default),
    _aten.amin.default: _extreme(_aten.amin.default),
    _aten.aminmax.default: _aminmax,
    _aten.angle.default: _angle,
    _aten.bucketize.Tensor: _bucketize,
    _aten.clamp.Tensor: _clamp,
    _aten.clamp_max.Tensor: _clamp_max,
    _aten.clamp_min.Tensor: _clamp,
    _aten.copysign.Tensor: _copysign,
    _aten.count_nonzero.default: _count_nonzero,
    _aten.count_nonzero.dim_IntList: _count_nonzero,
    _aten.exp2.default: _exp2,
    _aten.hypot.default: _hypot,
    _aten.signbit.default: _signbit,
}
"""Replaced while graphs are traced, in derivatives as well."""
