"""Normalization over features and groups, and its derivatives.

Means and variances of low-precision values are computed in float32, as PyTorch does.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from mpxla.device.pjrt.dtypes import widened
from mpxla.device.pjrt.table import implements

Three = tuple[jax.Array | None, jax.Array | None, jax.Array | None]


def _moments(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    mean = jnp.mean(x, axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axes, keepdims=True)


def _affine(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _centered(gradient: jax.Array, normalized: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Without what would move the mean or the variance."""
    share = jnp.mean(gradient, axes, keepdims=True)
    along = jnp.mean(gradient * normalized, axes, keepdims=True)
    return gradient - share - normalized * along


@implements("native_layer_norm")
def _layer_norm(
    x: jax.Array,
    shape: Sequence[int],
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    wide = widened(x)
    mean, variance = _moments(wide, axes)
    scale = lax.rsqrt(variance + eps)
    return _affine((wide - mean) * scale, weight, bias).astype(x.dtype), mean, scale


@implements("native_layer_norm_backward")
def _layer_norm_backward(
    gradient: jax.Array,
    x: jax.Array,
    shape: Sequence[int],
    mean: jax.Array,
    scale: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    output_mask: Sequence[bool],
) -> Three:
    inner = tuple(range(x.ndim - len(shape), x.ndim))
    outer = tuple(range(x.ndim - len(shape)))
    wide = widened(gradient)
    normalized = (widened(x) - mean) * scale
    of_normalized = wide if weight is None else wide * weight
    of_x = _centered(of_normalized, normalized, inner) * scale
    return of_x, jnp.sum(wide * normalized, outer), jnp.sum(wide, outer)


@implements("native_group_norm")
def _group_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    batch: int,
    channels: int,
    places: int,
    groups: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    wide = widened(x).reshape(batch, groups, -1)
    mean, variance = _moments(wide, (2,))
    scale = lax.rsqrt(variance + eps)
    weight, bias = (None if v is None else v.reshape(1, channels, 1) for v in (weight, bias))
    result = _affine(((wide - mean) * scale).reshape(batch, channels, places), weight, bias)
    return result.reshape(x.shape).astype(x.dtype), mean[..., 0], scale[..., 0]
