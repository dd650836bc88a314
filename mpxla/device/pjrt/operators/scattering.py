"""Writing by indices. Indices out of range write nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpxla.device.pjrt.dtypes import cast, compute_dtype
from mpxla.device.pjrt.operators.indexing import add_at, along, places_of
from mpxla.device.pjrt.table import implements


@implements("index_put", "_unsafe_index_put")
def _index_put(
    x: jax.Array,
    indices: Sequence[jax.Array | None],
    values: jax.Array,
    accumulate: bool = False,
) -> jax.Array:
    mask = indices[0]
    if mask is not None and mask.dtype.kind == "b":
        return _masked_put(x, indices, values, accumulate)
    places, values = places_of(indices), values.astype(x.dtype)
    return add_at(x, places, values) if accumulate else x.at[places].set(values)


def _masked_put(
    x: jax.Array, indices: Sequence[Any], values: jax.Array, accumulate: bool
) -> jax.Array:
    """`x[mask] = values`, where every place gets the same."""
    mask = indices[0]
    is_one = values.size == 1 or values.shape == x.shape[mask.ndim :]
    if len(indices) > 1 or not is_one:
        raise NotImplementedError(
            "an index of booleans with a value for each place needs to count them; use torch.where"
        )
    values = jnp.broadcast_to(values.astype(x.dtype), x.shape[mask.ndim :])
    mask = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
    return jnp.where(mask, x + values if accumulate else values, x)


def _sized(source: Any, index: jax.Array, dtype: np.dtype) -> jax.Array:
    """Those of the source that have an index."""
    if not hasattr(source, "shape"):
        return cast(source, dtype)
    return source[tuple(slice(size) for size in index.shape)].astype(dtype)


def _with_a_dimension(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Also for tensors without dimensions."""

    def call(x: jax.Array, dim: int, index: jax.Array, source: Any, *rest: Any, **keywords: Any):
        row = index if index.ndim else index[None]
        source = source[None] if getattr(source, "ndim", 1) == 0 and not index.ndim else source
        if x.ndim and index.ndim:
            return function(x, dim, index, source, *rest, **keywords)
        found = function(x if x.ndim else x[None], dim, row, source, *rest, **keywords)
        return found if x.ndim else found[0]

    return call


@implements("scatter.value", "scatter.src")
@_with_a_dimension
def _scatter(x: jax.Array, dim: int, index: jax.Array, source: Any) -> jax.Array:
    return x.at[along(x, dim, index)].set(_sized(source, index, x.dtype))


@implements("scatter.reduce", "scatter.value_reduce", "scatter_add")
@_with_a_dimension
def _scatter_with(
    x: jax.Array, dim: int, index: jax.Array, source: Any, *, reduce: str = "add"
) -> jax.Array:
    places, values = along(x, dim, index), _sized(source, index, x.dtype)
    return add_at(x, places, values) if reduce == "add" else x.at[places].multiply(values)


_STARTS: dict[str, Callable[[np.dtype], Any]] = {
    "sum": lambda dtype: 0,
    "mean": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "amax": lambda dtype: jnp.iinfo(dtype).min if dtype.kind in "iu" else -jnp.inf,
    "amin": lambda dtype: jnp.iinfo(dtype).max if dtype.kind in "iu" else jnp.inf,
}


def _reduce_at(
    x: jax.Array, places: tuple[Any, ...], values: jax.Array, reduce: str, include_self: bool
) -> jax.Array:
    """Sums, means, ... of what comes together at a place."""
    wide = np.dtype(np.int32) if x.dtype.kind == "b" else compute_dtype(x.dtype)
    if x.dtype != wide:
        terms = x.astype(wide), places, values.astype(wide)
        return _reduce_at(*terms, reduce, include_self).astype(x.dtype)
    start = x
    if not include_self:
        start = x.at[places].set(cast(_STARTS[reduce](x.dtype), x.dtype))
    where = start.at[places]
    put = {"amax": where.max, "amin": where.min, "prod": where.multiply}.get(reduce, where.add)
    total = put(values)
    if reduce != "mean":
        return total
    ones = jnp.full(x.shape, int(include_self), x.dtype)
    count = jnp.maximum(ones.at[places].add(jnp.ones_like(values)), 1)
    return jnp.floor_divide(total, count) if x.dtype.kind in "iu" else total / count


@implements("scatter_reduce.two")
@_with_a_dimension
def _scatter_reduce(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    values = _sized(source, index, x.dtype)
    return _reduce_at(x, along(x, dim, index), values, reduce, include_self)


def _row(x: jax.Array, dim: int, index: jax.Array) -> tuple[Any, ...]:
    return (*(slice(None),) * (dim % x.ndim), index.reshape(-1))


@implements("index_reduce")
def _index_reduce(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    is_scalar = not x.ndim
    x = x[None] if is_scalar else x
    source = source.reshape(-1) if not source.ndim else source
    found = _reduce_at(x, _row(x, dim, index), source, reduce, include_self)
    return found[0] if is_scalar else found


@implements("masked_scatter")
def _masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    if not source.size:  # then the mask picks nothing
        return x
    mask = jnp.broadcast_to(mask, x.shape)
    order = jnp.cumsum(mask.reshape(-1)) - 1
    values = jnp.take(source.reshape(-1), jnp.maximum(order, 0), mode="clip")
    return jnp.where(mask, values.reshape(x.shape), x)


@implements("masked_scatter_backward")
def _masked_scatter_backward(
    gradient: jax.Array, mask: jax.Array, sizes: Sequence[int]
) -> jax.Array:
    """What the mask picks of the gradient, in order; the rest of the result is zero."""
    count = int(np.prod(sizes, dtype=np.int64))
    mask = jnp.broadcast_to(mask, gradient.shape).reshape(-1)
    places = jnp.where(mask, jnp.cumsum(mask) - 1, count)
    picked = jnp.zeros(count, gradient.dtype).at[places].set(gradient.reshape(-1), mode="drop")
    return picked.reshape(tuple(sizes))


@implements("put")
def _put(x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False) -> jax.Array:
    flat, source = x.reshape(-1), source.reshape(index.shape)
    found = add_at(flat, (index,), source) if accumulate else flat.at[index].set(source)
    return found.reshape(x.shape)
