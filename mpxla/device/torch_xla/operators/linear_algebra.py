"""Factorizations of matrices that torch_xla 2.9 lacks or gets wrong.

It has inverses, triangular solving, determinants and singular values, but no LU, Cholesky or QR
decomposition. So equations are solved by the inverse, with one correction that makes up for its
rounding. The singular value decomposition is right for one matrix; of several, its last factor and
the shape of the values are not those that PyTorch gives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mpxla.graph.typed import input_of
from mpxla.stage.cleanup import replace_call
from mpxla.stage.solvers import OF_FACTORS

__all__ = ["FACTORIZATIONS", "correct_factorizations"]

_aten = torch.ops.aten
_LARGEST_UNROLLED = 64  # rows of a matrix whose Cholesky factor is written out column by column


def correct_factorizations(module: fx.GraphModule) -> None:
    """Replaces factorizations that the device computes wrongly by functions that put them right.

    Not while the graph is traced: fake tensors have the shapes that the device should give.
    """
    for node in list(module.graph.nodes):
        if node.target is _aten._linalg_svd.default and input_of(node).meta["val"].dim() > 2:
            replace_call(node, _batched_svd, node.args, node.kwargs)
    module.graph.lint()
    module.recompile()


def _batched_svd(
    matrices: torch.Tensor, full_matrices: bool = False, compute_uv: bool = True, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U, S, V^T of [..., M, N]; without `compute_uv` the first and the last mean nothing.

    The device exchanges the first two dimensions of V, and takes S for that of one matrix, so that
    operators after it go wrong. U and V give the same: S is the diagonal of U^T A V.
    """
    left, _, right = _aten._linalg_svd.default(matrices, full_matrices, True)
    right = right.transpose(0, 1)
    count = min(matrices.shape[-2:])
    values = (left[..., :count] * (matrices @ right[..., :count])).sum(-2).abs()
    return left, values, right.mT


# --- what torch's own derivatives are written with: replaced while graphs are traced --------------


def _solve_triangular(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> torch.Tensor:
    if not left:
        a, b, upper = a.mT, b.mT, not upper
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (t.expand(*batch, *t.shape[-2:]) for t in (a, b))
    x = _aten.triangular_solve.default(b, a, upper, False, unitriangular)[0]
    return x if left else x.mT


def _cholesky_ex(
    a: torch.Tensor, upper: bool = False, check_errors: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    size = a.shape[-1]
    if size > _LARGEST_UNROLLED:
        return NotImplemented
    a = a.mT if upper else a
    rows = torch.arange(size, device=a.device)
    factor = torch.zeros_like(a[..., :0])
    for j in range(size):
        column = a[..., j] - (factor @ factor[..., j, :, None]).squeeze(-1)
        column = column / column[..., j, None].sqrt()
        factor = torch.cat([factor, torch.where(rows >= j, column, 0)[..., None]], -1)
    failed = factor.isnan().any(-1).any(-1).to(torch.int32)
    return (factor.mT if upper else factor), failed


def _cholesky(a: torch.Tensor, upper: bool = False) -> torch.Tensor:
    found: Any = _cholesky_ex(a, upper)
    return found if found is NotImplemented else found[0]


def _checked(*_: Any, **__: Any) -> None:
    """Singular matrices give infinities: a compiled step has no branch that could raise."""


FACTORIZATIONS: dict[Any, Callable[..., Any]] = {
    **OF_FACTORS,
    _aten._linalg_check_errors.default: _checked,
    _aten.cholesky.default: _cholesky,
    _aten.linalg_cholesky_ex.default: _cholesky_ex,
    _aten.linalg_solve_triangular.default: _solve_triangular,
}
"""Replaced while graphs are traced, in derivatives as well."""
