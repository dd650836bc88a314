"""Reading by indices.

Indices out of range, for which PyTorch raises an error, give NaN where the dtype has it: programs
cannot raise.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpxla.device.pjrt.dtypes import widened
from mpxla.device.pjrt.table import implements


def take(x: jax.Array, index: jax.Array, dim: int) -> jax.Array:
    """Slices of `x` along a dimension."""
    return jnp.take(x, index, axis=dim, mode="fill")


def along(x: jax.Array, dim: int, index: jax.Array) -> tuple[jax.Array, ...]:
    """Places in `x` of an index that goes along one dimension, as `gather` has them."""
    ranks = np.ogrid[tuple(slice(size) for size in index.shape)]
    places: list[Any] = list(ranks)
    places[dim % x.ndim] = index
    return tuple(places)


implements("embedding")(lambda weight, index, *_: take(weight, index, 0))


@implements("index_select")
def _index_select(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    if not x.ndim:
        return x
    return take(x, index.reshape(-1), dim % x.ndim)


@implements("gather")
def _gather(x: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    if not x.ndim:
        return jnp.broadcast_to(x, index.shape)
    if not index.ndim:
        return x[index]
    return x.at[along(x, dim, index)].get(mode="fill")


@implements("nonzero_static")
def _nonzero_static(x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    if not x.ndim:
        return jnp.zeros((size, 0), np.int64)
    places = jnp.nonzero(x, size=size, fill_value=fill_value)
    return jnp.stack(places, 1).astype(np.int64)


def places_of(indices: Sequence[jax.Array | None]) -> tuple[Any, ...]:
    """PyTorch's list of indices as NumPy's tuple."""
    return tuple(slice(None) if index is None else index for index in indices)


def add_at(x: jax.Array, places: tuple[Any, ...], values: jax.Array) -> jax.Array:
    """Adds values where they belong; a sum of booleans, which jax does not add, is their `or`."""
    if x.dtype.kind == "b":
        counts = x.astype(np.int32).at[places].add(values.astype(np.int32))
        return counts.astype(bool)
    wide = widened(x)  # in 16 bits a sum stands still once a term is below half an ulp of it
    return wide.at[places].add(values.astype(wide.dtype)).astype(x.dtype)


@implements("index.Tensor", "_unsafe_index.Tensor")
def _index(x: jax.Array, indices: Sequence[jax.Array | None]) -> jax.Array:
    if any(i is not None and i.dtype.kind in "b" for i in indices):
        raise NotImplementedError(
            "an index of booleans gives a shape that depends on values; use torch.where"
        )
    return x.at[places_of(indices)].get(mode="fill")


@implements("take")
def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x.reshape(-1), index, mode="fill")
