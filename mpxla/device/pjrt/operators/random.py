"""Random numbers. Each function takes a key of jax's first; equal keys give equal numbers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from mpxla.device.pjrt.dtypes import compute_dtype, dtype_or, shape_and_dtype
from mpxla.device.pjrt.table import random

Like = jax.Array | Sequence[int]
"""What tells a shape: an array, or the shape itself."""


def _uniform(key: jax.Array, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
    """In [0, 1); drawn in float32 for low precision, where rounding could give one."""
    wide = compute_dtype(dtype)
    drawn = jax.random.uniform(key, tuple(shape), wide)
    if wide == dtype:
        return drawn
    below = np.float32(1) - np.float32(jnp.finfo(dtype).epsneg)
    return jnp.minimum(drawn, below).astype(dtype)


def _normal(key: jax.Array, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
    if dtype.kind == "c":
        return jax.random.normal(key, tuple(shape), dtype)
    return jax.random.normal(key, tuple(shape), compute_dtype(dtype)).astype(dtype)


@random("rand", "rand_like")
def _rand(key: jax.Array, like: Like, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _uniform(key, *shape_and_dtype(like, dtype))


@random("randn", "randn_like")
def _randn(key: jax.Array, like: Like, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _normal(key, *shape_and_dtype(like, dtype))


@random("randint_like.low_dtype")
def _randint(
    key: jax.Array, like: Like, low: int, high: int, *, dtype: torch.dtype | None = None
) -> jax.Array:
    wanted = dtype_or(dtype, like.dtype if isinstance(like, jax.Array) else np.dtype(np.int64))
    shape, _ = shape_and_dtype(like)
    return jax.random.randint(key, shape, low, high, np.int64).astype(wanted)


random("randint_like")(lambda key, x, high, **options: _randint(key, x, 0, high, **options))
random("randint")(lambda key, high, shape, **options: _randint(key, shape, 0, high, **options))
random("randint.low")(
    lambda key, low, high, shape, **options: _randint(key, shape, low, high, **options)
)


@random("randperm")
def _randperm(key: jax.Array, count: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    return jax.random.permutation(key, count).astype(dtype_or(dtype, np.dtype(np.int64)))


@random("bernoulli.p", "bernoulli.Tensor")
def _bernoulli_like(key: jax.Array, x: jax.Array, p: Any = 0.5) -> jax.Array:
    return jax.random.bernoulli(key, p, x.shape).astype(x.dtype)


@random("uniform")
def _uniform_like(key: jax.Array, x: jax.Array, low: float = 0, high: float = 1) -> jax.Array:
    return low + (high - low) * _uniform(key, x.shape, x.dtype)


@random("normal_functional")
def _normal_like(key: jax.Array, x: jax.Array, mean: float = 0, std: float = 1) -> jax.Array:
    return mean + std * _normal(key, x.shape, x.dtype)


@random("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
def _normal_around(key: jax.Array, mean: Any, std: Any = 1.0) -> jax.Array:
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    dtype = next(v.dtype for v in (mean, std) if hasattr(v, "dtype"))
    return mean + std * _normal(key, shape, dtype)


@random("normal.float_float")
def _normal_of(
    key: jax.Array,
    mean: float,
    std: float,
    shape: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
) -> jax.Array:
    return mean + std * _normal(key, shape, dtype_or(dtype))


@random("exponential")
def _exponential(key: jax.Array, x: jax.Array, lambd: float = 1) -> jax.Array:
    drawn = jax.random.exponential(key, x.shape, compute_dtype(x.dtype))
    return (drawn / lambd).astype(x.dtype)


@random("poisson")
def _poisson(key: jax.Array, rate: jax.Array) -> jax.Array:
    return jax.random.poisson(key, rate).astype(rate.dtype)


@random("multinomial")
def _multinomial(
    key: jax.Array, weights: jax.Array, count: int, replacement: bool = False
) -> jax.Array:
    """Indices [..., count] of rows [..., C]."""
    shape = (count, *weights.shape[:-1])
    logits = jnp.log(weights)
    drawn = jax.random.categorical(key, logits, shape=shape, replace=replacement)
    return jnp.moveaxis(drawn, 0, -1)
