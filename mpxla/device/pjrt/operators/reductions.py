"""Sums, products, extrema, moments and running sums."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from mpxla.device.pjrt.dtypes import as_float, compute_dtype, jax_dtype, widened
from mpxla.device.pjrt.operators.arithmetic import quotient
from mpxla.device.pjrt.operators.views import convert
from mpxla.device.pjrt.table import implements

Dims = int | Sequence[int] | None


def axes_of(dims: Dims, rank: int) -> tuple[int, ...]:
    """Dimensions as jax wants them; None, and an empty list, is all."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return tuple(range(rank))
    chosen = [dims] if isinstance(dims, int) else dims
    return tuple(d % rank for d in chosen) if rank else ()


def _sum_dtype(x: jax.Array, dtype: torch.dtype | None) -> np.dtype:
    if dtype is not None:
        return jax_dtype(dtype)
    return np.dtype(np.int64) if x.dtype.kind in "biu" else x.dtype


@implements("sum", "sum.dim_IntList")
def _sum(
    x: jax.Array, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> jax.Array:
    wanted = _sum_dtype(x, dtype)
    # Told a dtype of low precision, jax adds up in it: in bfloat16 300 ones make 256.
    x = convert(x, wanted).astype(compute_dtype(wanted))
    return jnp.sum(x, axes_of(dims, x.ndim), keepdims=keepdim, dtype=x.dtype)


@implements("mean", "mean.dim")
def _mean(
    x: jax.Array, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> jax.Array:
    x = x if dtype is None else convert(x, jax_dtype(dtype))
    axes = axes_of(dims, x.ndim)
    total = jnp.sum(widened(x), axes, keepdims=keepdim)
    return quotient(total, math.prod(x.shape[a] for a in axes))


@implements("prod", "prod.dim_int")
def _product(
    x: jax.Array, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> jax.Array:
    return jnp.prod(convert(x, _sum_dtype(x, dtype)), axes_of(dims, x.ndim), keepdims=keepdim)


def _along(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def call(x: jax.Array, dims: Dims = None, keepdim: bool = False) -> jax.Array:
        return function(x, axes_of(dims, x.ndim), keepdims=keepdim)

    return call


_amax = implements("amax")(_along(jnp.max))
_amin = implements("amin")(_along(jnp.min))


implements("max")(jnp.max)
implements("min")(jnp.min)


def _arg(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def call(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
        return function(x, dim, keepdims=keepdim) if x.ndim else jnp.zeros((), np.int64)

    return call


_argmax = implements("argmax")(_arg(jnp.argmax))
_argmin = implements("argmin")(_arg(jnp.argmin))


implements("max.dim")(lambda x, *where: (_amax(x, *where), _argmax(x, *where)))
implements("min.dim")(lambda x, *where: (_amin(x, *where), _argmin(x, *where)))

for _name, _function in (("any", jnp.any), ("all", jnp.all)):
    _logic = _along(_function)  # which would look at the real parts of complex numbers only
    implements(_name, f"{_name}.dim", f"{_name}.dims")(
        lambda x, *where, f=_logic: f(x.astype(bool), *where)
    )


@implements("var_mean.correction")
def _variance(
    x: jax.Array, dims: Dims = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    axes = axes_of(dims, x.ndim)
    wide = as_float(x)[0]
    wide = widened(wide)
    mean = jnp.mean(wide, axes, keepdims=True)
    count = float(np.prod([x.shape[a] for a in axes], dtype=np.int64))
    correction = 1 if correction is None else correction
    total = jnp.sum(jnp.square(jnp.abs(wide - mean)), axes, keepdims=keepdim)
    return total / max(count - correction, 0.0), mean if keepdim else jnp.squeeze(mean, axes)


implements("var.correction")(lambda x, *dims, **options: _variance(x, *dims, **options)[0])


def _running(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def call(x: jax.Array, dim: int, *, dtype: torch.dtype | None = None) -> jax.Array:
        x = convert(x, _sum_dtype(x, dtype))
        return function(widened(x), dim) if x.ndim else x

    return call


implements("cumsum")(_running(jnp.cumsum))
implements("cumprod")(_running(jnp.cumprod))


@implements("logcumsumexp")
def _logcumsumexp(x: jax.Array, dim: int) -> jax.Array:
    return lax.cumlogsumexp(widened(x), dim % x.ndim) if x.ndim else x


def _cumulative_extremum(x: jax.Array, dim: int, *, is_max: bool) -> tuple[jax.Array, jax.Array]:
    """The last of equal values counts, and a NaN stays."""
    if not x.ndim:
        return x, jnp.zeros((), np.int64)
    dim %= x.ndim
    places = lax.broadcasted_iota(np.int64, x.shape, dim)

    def later(
        old: tuple[jax.Array, jax.Array], new: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        wins = new[0] >= old[0] if is_max else new[0] <= old[0]
        wins = (wins | jnp.isnan(new[0])) & (~jnp.isnan(old[0]) | jnp.isnan(new[0]))
        return jnp.where(wins, new[0], old[0]), jnp.where(wins, new[1], old[1])

    return lax.associative_scan(later, (x, places), axis=dim)


implements("cummax")(partial(_cumulative_extremum, is_max=True))
implements("cummin")(partial(_cumulative_extremum, is_max=False))


def _softmax(
    function: Callable[..., jax.Array], of_one: int, x: jax.Array, dim: int, half_to_float: bool
) -> jax.Array:
    wide = widened(x)
    result = function(wide, dim) if x.ndim else jnp.full_like(wide, of_one)
    return result if half_to_float else result.astype(x.dtype)


implements("_softmax")(partial(_softmax, jax.nn.softmax, 1))
implements("_log_softmax")(partial(_softmax, jax.nn.log_softmax, 0))


@implements("_safe_softmax")
def _safe_softmax(x: jax.Array, dim: int, dtype: torch.dtype | None = None) -> jax.Array:
    """Softmax with zeros for rows in which every score is -inf, which their largest score tells.

    torch's own decomposition asks all scores for that, and chooses among all results.
    """
    kept = x.dtype if dtype is None else jax_dtype(dtype)
    rows = widened(convert(x, kept)).reshape(x.shape or (1,))
    largest = rows.max(dim, keepdims=True, initial=-jnp.inf)
    is_empty = largest == -jnp.inf
    powers = jnp.exp(rows - jnp.where(is_empty, 0, largest))
    result = powers / jnp.where(is_empty, 1, powers.sum(dim, keepdims=True))
    return result.reshape(x.shape).astype(kept)
