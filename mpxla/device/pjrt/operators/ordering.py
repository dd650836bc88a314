"""Sorting, and what rests on it. NaN is the greatest of numbers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpxla.device.pjrt.dtypes import cast
from mpxla.device.pjrt.table import implements


@implements("sort", "sort.stable")
def sort(
    x: jax.Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """Sorted values and their places; stable in any case."""
    if not x.ndim:
        return x, jnp.zeros((), np.int64)
    order = jnp.argsort(x, dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


@implements("topk")
def _topk(
    x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[jax.Array, jax.Array]:
    if not x.ndim:
        return x, jnp.zeros((), np.int64)
    if largest and x.dtype.kind != "b":
        # XLA takes a NaN with its sign bit set for the least of all.
        clean = jnp.where(jnp.isnan(x), jnp.nan, x) if x.dtype.kind not in "iu" else x
        _, places = lax.top_k(jnp.moveaxis(clean, dim, -1), k)
        places = jnp.moveaxis(places.astype(np.int64), -1, dim)
        return jnp.take_along_axis(x, places, dim), places
    values, places = sort(x, dim, largest)
    first = [slice(None)] * x.ndim
    first[dim % x.ndim] = slice(k)
    return values[tuple(first)], places[tuple(first)]


@implements("kthvalue")
def _kthvalue(
    x: jax.Array, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    values, places = sort(x, dim)
    return _pick(values, places, k - 1, dim, keepdim)


def _pick(
    values: jax.Array, places: jax.Array, index: Any, dim: int, keepdim: bool
) -> tuple[jax.Array, jax.Array]:
    if not values.ndim:
        return values, places
    index = jnp.asarray(index)
    index = index if index.ndim else index.reshape((1,) * values.ndim)
    shape = list(values.shape)
    shape[dim % values.ndim] = 1
    index = jnp.broadcast_to(index, shape)
    values, places = (jnp.take_along_axis(v, index, dim) for v in (values, places))
    return (values, places) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(places, dim))


def _median_along(
    x: jax.Array, dim: int, keepdim: bool = False, *, ignores_nan: bool
) -> tuple[jax.Array, jax.Array]:
    """The lower of two in the middle; a NaN wins unless ignored."""
    values, places = sort(x, dim)
    if not x.ndim:
        return values, places
    nans = jnp.isnan(x).sum(dim, keepdims=True)
    count = x.shape[dim]
    middle = (count - 1 - nans) // 2
    if not ignores_nan:
        middle = jnp.where(nans > 0, count - nans, middle)
    return _pick(values, places, jnp.maximum(middle, 0), dim, keepdim)


for _name, _ignores_nan in (("median", False), ("nanmedian", True)):
    _along = partial(_median_along, ignores_nan=_ignores_nan)
    implements(f"{_name}.dim")(_along)
    implements(_name)(lambda x, along=_along: along(x.reshape(-1), 0)[0])


@implements("mode")
def _mode(x: jax.Array, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The least of the most frequent values, and its last place."""
    if not x.ndim:
        return x, jnp.zeros((), np.int64)
    values, places = sort(x, dim)
    counts = _frequencies(values, dim % x.ndim)
    first = jnp.argmax(counts, dim, keepdims=True)
    last = first + jnp.take_along_axis(counts, first, dim) - 1
    return _pick(values, places, last, dim, keepdim)


def _frequencies(values: jax.Array, dim: int) -> jax.Array:
    """How often each value occurs along a dimension."""
    pairs = jnp.expand_dims(values, dim) == jnp.expand_dims(values, dim + 1)
    return jnp.sum(pairs, dim)


@implements("searchsorted.Tensor")
def _searchsorted(
    sequence: jax.Array,
    values: jax.Array,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    side = side or ("right" if right else "left")
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, -1)
    if sequence.ndim == 1:
        return jnp.searchsorted(sequence, values, side=side)
    rows = sequence.reshape(-1, sequence.shape[-1])
    found = jax.vmap(lambda s, v: jnp.searchsorted(s, v, side=side))(
        rows, values.reshape(rows.shape[0], -1)
    )
    return found.reshape(values.shape)


implements("searchsorted.Scalar")(
    lambda sequence, value, **how: _searchsorted(sequence, cast(value, sequence.dtype), **how)
)
implements("bucketize.Tensor")(
    lambda values, boundaries, **how: _searchsorted(boundaries, values, **how)
)


@implements("histc")
def _histc(x: jax.Array, bins: int = 100, min: float = 0, max: float = 0) -> jax.Array:
    low, high = cast(min, x.dtype), cast(max, x.dtype)
    if min == max:
        low, high = jnp.min(x), jnp.max(x)
        is_flat = low == high
        low, high = jnp.where(is_flat, low - 1, low), jnp.where(is_flat, high + 1, high)
    place = jnp.floor((x - low) / (high - low) * bins).astype(np.int64).clip(0, bins - 1)
    counts = ((x >= low) & (x <= high)).astype(x.dtype)
    return jnp.zeros(bins, x.dtype).at[place.reshape(-1)].add(counts.reshape(-1))
