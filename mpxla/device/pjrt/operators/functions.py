"""Functions of one number, elementwise."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from mpxla.device.pjrt.dtypes import as_float, widened
from mpxla.device.pjrt.operators.arithmetic import arctan2
from mpxla.device.pjrt.table import implements


def _digamma(x: jax.Array) -> jax.Array:
    """In float64: next to a pole, float32 leaves nothing of the distance to it."""
    found = special.digamma(x.astype(np.float64)).astype(x.dtype)
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), found)  # jax has NaN there


def _in_double(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """In float64 and rounded to the dtype of `x`: what is a whole number comes out as one."""
    wide = np.complex128 if jnp.iscomplexobj(x) else np.float64
    return function(x.astype(wide)).astype(x.dtype)


def _logarithm(x: jax.Array, base: float) -> jax.Array:
    """Of a power of the base exactly its exponent: scripts count digits and levels with it."""
    if jnp.iscomplexobj(x):
        return jnp.log(x) / math.log(base)
    if x.dtype != np.float64:
        return _in_double(lambda y: jnp.log(y) / math.log(base), x)
    found = jnp.log(x) / math.log(base)
    whole = jnp.round(found)
    return jnp.where(jnp.power(base, whole) == x, whole, found)


def _arctan(x: jax.Array) -> jax.Array:
    return jnp.arctan(x) if jnp.iscomplexobj(x) else arctan2(x, jnp.ones_like(x))


def _as_wide_float(x: jax.Array) -> jax.Array:
    """PyTorch computes functions of low precision in float32; the result is rounded once."""
    (value,) = as_float(x)
    return widened(value)


# Integers become numbers of the default dtype first.
_OF_FLOATS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": _arctan,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "digamma": _digamma,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": special.erfinv,
    "exp": jnp.exp,
    "exp2": lambda x: _in_double(lambda y: jnp.power(2.0, y), x),
    "expm1": jnp.expm1,
    "i0": special.i0,
    "lgamma": special.gammaln,
    "log": jnp.log,
    "log10": lambda x: _logarithm(x, 10.0),
    "log1p": jnp.log1p,
    "log2": lambda x: _logarithm(x, 2.0),
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "special_i0e": special.i0e,
    "special_i1": special.i1,
    "special_i1e": special.i1e,
    "special_log_ndtr": special.log_ndtr,
    "special_ndtri": special.ndtri,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}
for _name, _function in _OF_FLOATS.items():
    implements(_name)(lambda x, f=_function: f(_as_wide_float(x)))


def _unless_integer(function: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    return lambda x: x if x.dtype.kind in "biu" else function(x)


def _sgn(x: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(x):
        return x if x.dtype.kind == "b" else jnp.where(jnp.isnan(x), 0, jnp.sign(x))
    size = jnp.abs(x)
    return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size))


_OF_ALL: dict[str, Callable[[jax.Array], jax.Array]] = {
    "abs": jnp.abs,
    "bitwise_not": jnp.bitwise_not,
    "ceil": _unless_integer(jnp.ceil),
    "_conj": jnp.conj,
    "_conj_physical": jnp.conj,
    "floor": _unless_integer(jnp.floor),
    "isinf": jnp.isinf,
    "isfinite": jnp.isfinite,
    "isnan": jnp.isnan,
    "logical_not": jnp.logical_not,
    "neg": jnp.negative,
    "round": _unless_integer(jnp.round),
    "sgn": _sgn,
    "sign": _sgn,
    "signbit": lambda x: (
        jnp.signbit(x) if x.dtype.kind not in ("b", "u") else jnp.zeros_like(x, bool)
    ),
    "trunc": _unless_integer(jnp.trunc),
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
    "view_as_real": lambda x: jnp.stack([x.real, x.imag], -1),
}
for _name, _function in _OF_ALL.items():
    implements(_name)(_function)


@implements("angle")
def _angle(x: jax.Array) -> jax.Array:
    x = as_float(x)[0]
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, math.pi, 0).astype(x.dtype))


@implements("round.decimals")
def _round_to_decimals(x: jax.Array, *, decimals: int = 0) -> jax.Array:
    if x.dtype.kind in "biu" or decimals == 0:
        return x if x.dtype.kind in "biu" else jnp.round(x)
    scale = 10.0 ** abs(decimals)
    return jnp.round(x * scale) / scale if decimals > 0 else jnp.round(x / scale) * scale


@implements("polar")
def _polar(length: jax.Array, angle: jax.Array) -> jax.Array:
    return lax.complex(length * jnp.cos(angle), length * jnp.sin(angle))


@implements("polygamma")
def _polygamma(order: int, x: jax.Array) -> jax.Array:
    x = as_float(x)[0]
    return _digamma(x) if order == 0 else _higher_polygamma(order, x)


_MOST_SHIFTS = 10_000
"""How far a negative number is brought up to the positive ones, step by step as PyTorch does."""


def _higher_polygamma(order: int, x: jax.Array) -> jax.Array:
    """(-1)^(n + 1) n! zeta(n + 1, x); jax's zeta is that of positive numbers."""

    def is_low(q: jax.Array) -> jax.Array:
        return (q < 1) & (q > -_MOST_SHIFTS)

    def shifted(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, q = state
        low = is_low(q)
        return total + jnp.where(low, q ** -(order + 1), 0), jnp.where(low, q + 1, q)

    wide = x.astype(np.float64)
    start = jnp.zeros_like(wide), wide
    total, q = jax.lax.while_loop(lambda state: is_low(state[1]).any(), shifted, start)
    found = total + special.zeta(jnp.asarray(order + 1, np.float64), q)
    return ((-1) ** (order + 1) * math.factorial(order) * found).astype(x.dtype)
