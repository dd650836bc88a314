"""Solutions of linear equations and determinants, written so that devices can differentiate them.

PyTorch's derivatives read LU decompositions, of which it depends on how a matrix lies in memory
whose they are. These read inverses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpxla.graph.typed import Function

__all__ = ["OF_FACTORS", "SOLVERS"]

_aten = torch.ops.aten


class _Solve(Function):
    """X of A X = B, for A [..., N, N] and B [..., N, K] of equal batches."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        inverse = _aten.linalg_inv_ex.default(a)[0]
        x = _by_inverse(a, inverse, b)
        ctx.save_for_backward(a, inverse, x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, inverse, x = ctx.saved_tensors
        d_b = _by_inverse(a.mT, inverse.mT, grad)
        return -d_b @ x.mT, d_b


def _by_inverse(a: torch.Tensor, inverse: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = inverse @ b
    return x + inverse @ (b - a @ x)


def _solve(a: torch.Tensor, b: torch.Tensor, *, left: bool = True) -> torch.Tensor:
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    columns = b.unsqueeze(-1) if is_vector else b
    if not left:
        a, columns = a.mT, columns.mT
    batch = torch.broadcast_shapes(a.shape[:-2], columns.shape[:-2])
    a, columns = (t.expand(*batch, *t.shape[-2:]) for t in (a, columns))
    x = _Solve.apply(a, columns)
    x = x if left else x.mT
    return x.squeeze(-1) if is_vector else x


def _solve_ex(
    a: torch.Tensor, b: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    info = torch.zeros(a.shape[:-2], dtype=torch.int32, device=a.device)
    return _solve(a, b, left=left), info


def _tensorsolve(
    a: torch.Tensor, b: torch.Tensor, dims: Sequence[int] | None = None
) -> torch.Tensor:
    if dims is not None:
        a = a.movedim(list(dims), list(range(a.dim() - len(dims), a.dim())))
    unknown = a.shape[b.dim() :]
    return _solve(a.reshape(b.numel(), -1), b.flatten()).reshape(unknown)


def _inverse(a: torch.Tensor) -> torch.Tensor:
    return _aten.linalg_inv_ex.default(a)[0]


def _inv_ex(a: torch.Tensor, *, check_errors: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """With 1 for a singular matrix; torch_xla 2.9 gives that number the shape of the matrix."""
    inverse = _inverse(a)
    return inverse, inverse.isfinite().all(-1).all(-1).logical_not().to(torch.int32)


class _LogDeterminant(Function):
    """Sign and logarithm of the magnitude; torch's derivative would read an LU decomposition."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sign, magnitude, *_ = _aten._linalg_slogdet.default(a)
        ctx.save_for_backward(a)
        ctx.mark_non_differentiable(sign)
        return sign, magnitude

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        (a,) = ctx.saved_tensors
        return grad[..., None, None] * _inverse(a).mT


_slogdet = _LogDeterminant.apply


def _det(a: torch.Tensor) -> torch.Tensor:
    sign, magnitude = _slogdet(a)
    return sign * magnitude.exp()


def _logdet(a: torch.Tensor) -> torch.Tensor:
    sign, magnitude = _slogdet(a)
    return torch.where(sign < 0, torch.nan, magnitude)


def _qr(a: torch.Tensor, some: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linalg.qr(a, "reduced" if some else "complete")


def _svd(
    a: torch.Tensor, some: bool = True, compute_uv: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    left, values, right = torch.linalg.svd(a, full_matrices=not some)
    if not compute_uv:
        rows, columns = a.shape[-2:]
        sizes = ([*a.shape[:-2], size, size] for size in (rows, columns))
        return a.new_zeros(next(sizes)), values, a.new_zeros(next(sizes))
    return left, values, right.mT


SOLVERS: dict[Any, Callable[..., Any]] = {
    _aten.det.default: _det,
    _aten.inverse.default: _inverse,
    _aten.linalg_det.default: _det,
    _aten.linalg_inv.default: _inverse,
    _aten.linalg_inv_ex.default: _inv_ex,
    _aten.linalg_slogdet.default: _slogdet,
    _aten.linalg_solve.default: _solve,
    _aten.linalg_solve_ex.default: _solve_ex,
    _aten.linalg_tensorsolve.default: _tensorsolve,
    _aten.logdet.default: _logdet,
    _aten.slogdet.default: _slogdet,
}
"""Replaced before differentiation."""

for _name, _function in (("qr", _qr), ("svd", _svd)):
    if hasattr(_aten, _name):  # PyTorch 2.15 has them no more
        SOLVERS[getattr(_aten, _name).default] = _function


def _cholesky_solve(b: torch.Tensor, factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """X of L L^H X = B."""
    lower = factor.mH if upper else factor
    half = _aten.linalg_solve_triangular.default(lower, b, upper=False)
    return _aten.linalg_solve_triangular.default(lower.mH, half, upper=True)


def _cholesky_inverse(factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    unit = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return _cholesky_solve(unit, factor, upper)


def _pinv(
    a: torch.Tensor,
    *,
    atol: torch.Tensor | None = None,
    rtol: torch.Tensor | None = None,
    hermitian: bool = False,
) -> torch.Tensor:
    """Singular values up to max(atol, rtol * the largest) count as zeros."""
    if hermitian:  # only the lower triangle counts
        a = a.tril() + a.tril(-1).mH
    left, values, right = _aten._linalg_svd.default(a, False, True)
    if rtol is None:
        usual = max(a.shape[-2:]) * torch.finfo(a.dtype).eps
        rtol = torch.full(values.shape[:-1], usual, dtype=values.dtype, device=a.device)
        rtol = rtol if atol is None else torch.where(atol > 0, 0.0, rtol)
    smallest = values[..., :1] * rtol[..., None]
    if atol is not None:
        smallest = torch.maximum(smallest, atol[..., None])
    counts = values > smallest
    inverted = torch.where(counts, 1 / torch.where(counts, values, 1), 0)
    # Not `mH`: graphs would forget the mark by which it conjugates lazily.
    right, left = right.mT.conj_physical(), left.mT.conj_physical()
    return (right * inverted[..., None, :]) @ left


OF_FACTORS: dict[Any, Callable[..., Any]] = {
    _aten.cholesky_inverse.default: _cholesky_inverse,
    _aten.cholesky_solve.default: _cholesky_solve,
    _aten.linalg_pinv.atol_rtol_tensor: _pinv,
}
"""Replaced while graphs are traced, in derivatives as well."""
