"""Activation functions and their derivatives.

Those of several operations compute in float32 where the values are of low precision, and round the
result once, as PyTorch's kernels do.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpxla.device.pjrt.dtypes import cast, widened
from mpxla.device.pjrt.table import implements


def _rounded_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the function wide values; who calls it casts the result."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        wide = [widened(a) if isinstance(a, jax.Array) else a for a in args]
        return function(*wide, **kwargs)

    return call


@implements("gelu")
@_rounded_once
def _gelu(x: jax.Array, *, approximate: str = "none") -> jax.Array:
    if approximate == "tanh":
        return jax.nn.gelu(x, approximate=True)
    # PyTorch's formula. jax's is written with erfc, which takes XLA's CPU twice as long.
    return x * (0.5 + 0.5 * jax.lax.erf(x * math.sqrt(0.5)))


@implements("gelu_backward")
@_rounded_once
def _gelu_backward(gradient: jax.Array, x: jax.Array, *, approximate: str = "none") -> jax.Array:
    forward = functools.partial(_gelu, approximate=approximate)
    return jax.vjp(forward, x)[1](gradient.astype(x.dtype))[0]


@implements("relu")
def _relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, cast(0, x.dtype))


@implements("silu")
@_rounded_once
def _silu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


@implements("silu_backward")
@_rounded_once
def _silu_backward(gradient: jax.Array, x: jax.Array) -> jax.Array:
    slope = jax.nn.sigmoid(x)
    return gradient * slope * (1 + x * (1 - slope))


@implements("tanh_backward")
@_rounded_once
def _tanh_backward(gradient: jax.Array, result: jax.Array) -> jax.Array:
    return gradient * (1 - result * result).conj()


@implements("sigmoid_backward")
@_rounded_once
def _sigmoid_backward(gradient: jax.Array, result: jax.Array) -> jax.Array:
    return gradient * ((1 - result) * result).conj()


@implements("threshold_backward")
def _threshold_backward(gradient: jax.Array, x: jax.Array, threshold: Any) -> jax.Array:
    return jnp.where(x <= cast(threshold, x.dtype), cast(0, gradient.dtype), gradient)


@implements("elu")
@_rounded_once
def _elu(x: jax.Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> jax.Array:
    below = jnp.expm1(jnp.minimum(x, 0) * input_scale) * (alpha * scale)
    return jnp.where(x > 0, x * scale, below)


@implements("leaky_relu")
@_rounded_once
def _leaky_relu(x: jax.Array, slope: Any = 0.01) -> jax.Array:
    return jnp.where(x > 0, x, x * slope)


@implements("hardtanh")
def _hardtanh(x: jax.Array, low: Any = -1, high: Any = 1) -> jax.Array:
    return jnp.minimum(jnp.maximum(x, cast(low, x.dtype)), cast(high, x.dtype))


@implements("softplus")
@_rounded_once
def _softplus(x: jax.Array, beta: Any = 1, threshold: Any = 20) -> jax.Array:
    scaled = x * beta
    is_linear = scaled > threshold
    return jnp.where(is_linear, x, jnp.log1p(jnp.exp(jnp.where(is_linear, 0, scaled))) / beta)


@implements("log_sigmoid_forward")
@_rounded_once
def _log_sigmoid(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logarithm, and a buffer that PyTorch's CPU kernel keeps for its derivative."""
    rest = jnp.exp(-jnp.abs(x))
    return jnp.minimum(x, 0) - jnp.log1p(rest), rest


@implements("log_sigmoid_backward")
@_rounded_once
def _log_sigmoid_backward(gradient: jax.Array, x: jax.Array, _: jax.Array) -> jax.Array:
    return gradient * jax.nn.sigmoid(-x)


@implements("hardshrink_backward", "softshrink_backward")
def _shrink_backward(gradient: jax.Array, x: jax.Array, lambd: Any) -> jax.Array:
    is_inside = (x >= -lambd) & (x <= lambd)
    return jnp.where(is_inside, cast(0, gradient.dtype), gradient)
