"""Normalization over features, groups and batches, and its derivatives.

Means and variances of low-precision values are computed in float32, as PyTorch does.
"""

import math
from collections.abc import Sequence
from typing import Any

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
    of_x = of_weight = of_bias = None
    if output_mask[0]:
        of_x = _centered(of_normalized, normalized, inner) * scale
    if output_mask[1]:
        of_weight = jnp.sum(wide * normalized, outer)
    if output_mask[2]:
        of_bias = jnp.sum(wide, outer)
    return of_x, of_weight, of_bias


@implements("_fused_rms_norm")
def _rms_norm(
    x: jax.Array, shape: Sequence[int], weight: jax.Array | None, eps: float | None
) -> tuple[jax.Array, jax.Array]:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    wide = widened(x)
    eps = float(jnp.finfo(wide.dtype).eps) if eps is None else eps
    scale = lax.rsqrt(jnp.mean(wide * wide, axes, keepdims=True) + eps)
    result = wide * scale
    return (result if weight is None else result * weight).astype(x.dtype), scale


@implements("_fused_rms_norm_backward")
def _rms_norm_backward(
    gradient: jax.Array,
    x: jax.Array,
    shape: Sequence[int],
    scale: jax.Array,
    weight: jax.Array | None,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array | None]:
    inner = tuple(range(x.ndim - len(shape), x.ndim))
    wide, normalized = widened(gradient), widened(x) * scale
    of_normalized = wide if weight is None else wide * weight
    along = jnp.mean(of_normalized * normalized, inner, keepdims=True)
    of_x = (of_normalized - normalized * along) * scale if output_mask[0] else None
    is_wanted = output_mask[1] and weight is not None
    outer = tuple(range(x.ndim - len(shape)))
    return of_x, jnp.sum(wide * normalized, outer) if is_wanted else None


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


def _by_channel(values: jax.Array, x: jax.Array) -> jax.Array:
    """[C] to go with [B, C, ...]."""
    return values.reshape(1, -1, *[1] * (x.ndim - 2))


def _batch_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    weight, bias = (None if v is None else _by_channel(v, x) for v in (weight, bias))
    result = (widened(x) - _by_channel(mean, x)) * _by_channel(scale, x)
    return _affine(result, weight, bias).astype(x.dtype)


def _updated(old: jax.Array | None, new: jax.Array, momentum: float) -> jax.Array | None:
    return None if old is None else old * (1 - momentum) + momentum * new.astype(old.dtype)


@implements("_native_batch_norm_legit_functional")
def _batch_norm_functional(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[jax.Array | None, ...]:
    if not training:
        result = _in_evaluation(x, weight, bias, running_mean, running_var, eps)
        return (*result, running_mean, running_var)
    axes = (0, *range(2, x.ndim))
    count = math.prod(x.shape[a] for a in axes)
    mean, variance = (v.reshape(-1) for v in _moments(widened(x), axes))
    scale = lax.rsqrt(variance + eps)
    return (
        _batch_norm(x, weight, bias, mean, scale),
        mean,
        scale,
        _updated(running_mean, mean, momentum),
        _updated(running_var, variance * (count / max(count - 1, 1)), momentum),
    )


def _in_evaluation(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    variance: jax.Array,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    scale = lax.rsqrt(widened(variance) + eps)
    empty = jnp.zeros((0,), scale.dtype)
    return _batch_norm(x, weight, bias, widened(mean), scale), empty, empty


implements("native_batch_norm")(lambda *arguments: _batch_norm_functional(*arguments)[:3])
implements("_native_batch_norm_legit_no_training")(
    lambda x, weight, bias, mean, variance, _, eps: _in_evaluation(
        x, weight, bias, mean, variance, eps
    )
)
implements("_native_batch_norm_legit.no_stats")(
    lambda x, weight, bias, _, momentum, eps: _batch_norm_functional(
        x, weight, bias, None, None, True, momentum, eps
    )[:3]
)
