"""Factorizations and solutions of linear equations.

Signs and phases of singular vectors and of the columns of Q are the device's choice, as they are
PyTorch's there. Determinants and solutions are not here: what their derivatives read depends on how
a matrix lies in memory, so the lowering writes them with other operators (of `_linalg_slogdet` it
takes the first two results only).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpxla.device.pjrt.table import implements


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _cholesky(x: jax.Array, upper: bool = False) -> jax.Array:
    lower = lax.linalg.cholesky(_adjoint(x) if upper else x, symmetrize_input=False)
    return _adjoint(lower) if upper else lower


@implements("linalg_cholesky_ex")
def _cholesky_ex(
    x: jax.Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _cholesky(x, upper), jnp.zeros(x.shape[:-2], np.int32)


implements("cholesky")(_cholesky)


@implements("linalg_solve_triangular")
def _solve_triangular(
    matrix: jax.Array,
    right: jax.Array,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> jax.Array:
    batch = np.broadcast_shapes(matrix.shape[:-2], right.shape[:-2])
    return lax.linalg.triangular_solve(
        jnp.broadcast_to(matrix, (*batch, *matrix.shape[-2:])),
        jnp.broadcast_to(right, (*batch, *right.shape[-2:])),
        left_side=left,
        lower=not upper,
        unit_diagonal=unitriangular,
    )


@implements("triangular_solve")
def _triangular_solve(
    right: jax.Array,
    matrix: jax.Array,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[jax.Array, jax.Array]:
    turned = jnp.swapaxes(matrix, -1, -2) if transpose else matrix
    is_upper = upper != transpose
    solution = _solve_triangular(turned, right, upper=is_upper, unitriangular=unitriangular)
    return solution, jnp.broadcast_to(matrix, (*solution.shape[:-2], *matrix.shape[-2:]))


@implements("linalg_inv_ex")
def _inv_ex(x: jax.Array, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    return jnp.linalg.inv(x), jnp.zeros(x.shape[:-2], np.int32)


def _pivots_to_matrix(pivots: jax.Array, size: int) -> jax.Array:
    """PyTorch's row exchanges (from one) as a matrix of zeros and ones."""
    order = lax.linalg.lu_pivots_to_permutation(pivots.astype(np.int32) - 1, size)
    rows = jnp.arange(size)
    return (rows[:, None] == order[..., None, :]).astype(np.int32)


@implements("linalg_lu_factor_ex")
def _lu_factor_ex(
    x: jax.Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    factors, pivots, _ = lax.linalg.lu(x)
    return factors, pivots + 1, jnp.zeros(x.shape[:-2], np.int32)


@implements("lu_unpack")
def _lu_unpack(
    factors: jax.Array, pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, columns = factors.shape[-2:]
    rank = min(rows, columns)
    nothing = jnp.zeros((0,), factors.dtype)
    lower = jnp.tril(factors[..., :, :rank], -1) + jnp.eye(rows, rank, dtype=factors.dtype)
    upper = jnp.triu(factors[..., :rank, :])
    permutation = _pivots_to_matrix(pivots, rows).astype(factors.dtype)
    return (
        permutation if unpack_pivots else nothing,
        lower if unpack_data else nothing,
        upper if unpack_data else nothing,
    )


@implements("linalg_lu")
def _lu(x: jax.Array, *, pivot: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    factors, pivots, _ = _lu_factor_ex(x)
    return _lu_unpack(factors, pivots)


@implements("linalg_lu_solve")
def _lu_solve(
    factors: jax.Array,
    pivots: jax.Array,
    right: jax.Array,
    *,
    left: bool = True,
    adjoint: bool = False,
) -> jax.Array:
    if not left:
        return _adjoint(_lu_solve(factors, pivots, _adjoint(right), adjoint=not adjoint))
    batch = np.broadcast_shapes(factors.shape[:-2], right.shape[:-2])
    right = jnp.broadcast_to(right, (*batch, *right.shape[-2:]))  # else jax may see vectors
    return jax.scipy.linalg.lu_solve((factors, pivots - 1), right, 2 if adjoint else 0)


@implements("_linalg_slogdet")
def _slogdet(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The factors and the exchanges of rows are those of `x`, not of its transpose."""
    return (*jnp.linalg.slogdet(x), *_lu_factor_ex(x)[:2])


@implements("linalg_qr")
def _qr(x: jax.Array, mode: str = "reduced") -> tuple[jax.Array, jax.Array]:
    if mode == "r":
        return jnp.zeros((0,), x.dtype), jnp.linalg.qr(x, mode="r")
    q, r = jnp.linalg.qr(x, mode=mode)
    return q, r


@implements("_linalg_svd")
def _svd(
    x: jax.Array,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if not compute_uv:
        empty = jnp.zeros((0,), x.dtype)
        return empty, jnp.linalg.svd(x, compute_uv=False), empty
    return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))


@implements("_linalg_eigh")
def _eigh(x: jax.Array, part: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    values, vectors = jnp.linalg.eigh(x, UPLO=part.upper(), symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros((0,), x.dtype)


implements("linalg_householder_product")(lax.linalg.householder_product)
implements("linalg_matrix_exp")(jax.scipy.linalg.expm)


def _norm(normalization: int, forward: bool) -> str:
    """Jax's name for PyTorch's number of what divides a transform."""
    names = ("backward", "ortho", "forward")
    return names[normalization if forward else 2 - normalization]


@implements("_fft_c2c")
def _fft_c2c(x: jax.Array, dims: list[int], normalization: int, forward: bool) -> jax.Array:
    function = jnp.fft.fftn if forward else jnp.fft.ifftn
    return function(x, axes=tuple(dims), norm=_norm(normalization, forward))


@implements("_fft_r2c")
def _fft_r2c(x: jax.Array, dims: list[int], normalization: int, onesided: bool) -> jax.Array:
    function = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return function(x, axes=tuple(dims), norm=_norm(normalization, True))


@implements("_fft_c2r")
def _fft_c2r(x: jax.Array, dims: list[int], normalization: int, last: int) -> jax.Array:
    sizes = [x.shape[d] for d in dims[:-1]] + [last]
    return jnp.fft.irfftn(x, sizes, tuple(dims), norm=_norm(normalization, False))
