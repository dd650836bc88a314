"""Arithmetic of two or three operands, and of bits."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from mpxla.device.pjrt.dtypes import as_float, cast, promote, result_type, widened
from mpxla.device.pjrt.table import implements


def _scaled(value: Any, factor: Any) -> Any:
    return value if isinstance(factor, (int, float)) and factor == 1 else value * factor


def _is_bool(value: jax.Array) -> bool:
    return value.dtype.kind == "b"


def _is_integer(value: jax.Array) -> bool:
    return value.dtype.kind in "iu"


def _summands(left: Any, right: Any, alpha: Any) -> list[jax.Array]:
    """`left` and `alpha` times `right`: rounded to the dtype of the result each, but no product."""
    terms = promote(left, right)
    factor = cast(alpha, terms[0].dtype)
    a, b, factor = map(widened, (*terms, factor))
    return [a, b if alpha == 1 else b * factor]


@implements("add.Tensor", "add.Scalar")
def _add(left: Any, right: Any, alpha: Any = 1) -> jax.Array:
    a, b = _summands(left, right, alpha)
    return a | b if _is_bool(a) else a + b


@implements("sub.Tensor", "sub.Scalar")
def _subtract(left: Any, right: Any, alpha: Any = 1) -> jax.Array:
    a, b = _summands(left, right, alpha)
    return a - b


@implements("mul.Tensor", "mul.Scalar")
def _multiply(left: Any, right: Any) -> jax.Array:
    a, b = promote(left, right, wide=True)
    return a & b if _is_bool(a) else a * b


def quotient(a: jax.Array, b: Any) -> jax.Array:
    """a / b, rounded once.

    XLA multiplies by the inverse of a divisor that is a constant or the same for many elements, and
    41 by the inverse of 41 is less than one: the barrier hides what the divisor is. It is gone
    before operations are fused.
    """
    if isinstance(b, (int, float)) and abs(math.frexp(b)[0]) == 0.5:
        return a / cast(b, a.dtype)  # a power of two has an exact inverse
    divisor = cast(b, a.dtype)
    shape = jnp.broadcast_shapes(a.shape, divisor.shape)
    return a / lax.optimization_barrier(jnp.broadcast_to(divisor, shape))


@implements("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def _divide(left: Any, right: Any, rounding_mode: str | None = None) -> jax.Array:
    if rounding_mode is None:
        a, _ = as_float(left, right, wide=True)
        return quotient(a, right)
    a, b = promote(left, right, wide=True)
    if rounding_mode == "floor":
        return _divide_floored(a, b)
    if _is_integer(a):
        shape = jnp.broadcast_shapes(a.shape, b.shape)
        return lax.div(jnp.broadcast_to(a, shape), jnp.broadcast_to(b, shape))
    return jnp.trunc(quotient(a, b))


def _divide_floored(a: jax.Array, b: jax.Array) -> jax.Array:
    if not _is_integer(a):
        # As PyTorch does: exact for quotients near an integer, infinite for division by zero.
        rest = lax.rem(*jnp.broadcast_arrays(a, b))
        whole = (a - rest) / b
        whole = jnp.where((rest != 0) & ((b < 0) != (rest < 0)), whole - 1, whole)
        floored = jnp.floor(whole)
        floored = jnp.where(whole - floored > 0.5, floored + 1, floored)
        floored = jnp.where(whole == 0, jnp.copysign(jnp.zeros_like(floored), a / b), floored)
        return jnp.where(b == 0, a / b, floored)
    return jnp.floor_divide(a, b)


implements("floor_divide", "floor_divide.Scalar")(partial(_divide, rounding_mode="floor"))


@implements("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def _power(base: Any, exponent: Any) -> jax.Array:
    a, b = promote(base, exponent)
    if isinstance(exponent, (int, float)):
        if exponent == 2:
            return a * a
        if exponent == 3:
            return a * a * a
        if exponent == 0.5 and not _is_integer(a):
            return jnp.sqrt(a)
    if _is_integer(a):
        # A negative exponent gives the integer part of the inverse.
        inverse = jnp.where(a == 1, 1, jnp.where(a == -1, jnp.where(b % 2 == 0, 1, -1), 0))
        return jnp.where(b < 0, inverse, jnp.power(a, jnp.maximum(b, 0))).astype(a.dtype)
    return jnp.power(a, b)


def _shift_left(a: jax.Array, b: jax.Array) -> jax.Array:
    is_out = (b < 0) | (b >= 8 * a.dtype.itemsize)
    return jnp.where(is_out, 0, jnp.left_shift(a, jnp.where(is_out, 0, b)))


def _shift_right(a: jax.Array, b: jax.Array) -> jax.Array:
    most = 8 * a.dtype.itemsize - 1
    is_out = (b < 0) | (b > most)
    found = jnp.right_shift(a, jnp.where(is_out, most, b).astype(a.dtype))
    return found if jnp.issubdtype(a.dtype, jnp.signedinteger) else jnp.where(is_out, 0, found)


def _times(logarithm: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """a log(b), which is zero where a is, unless b is NaN."""
    return lambda a, b: jnp.where(jnp.isnan(b), jnp.nan, jnp.where(a == 0, 0, a * logarithm(b)))


def _binary(
    names: tuple[str, ...],
    function: Callable[..., Any],
    prepare: Callable[..., list[jax.Array]] = promote,
) -> None:
    implements(*names)(lambda left, right: function(*prepare(left, right)))


def arctan2(y: jax.Array, x: jax.Array) -> jax.Array:
    """The angle of a point.

    XLA's code for the CPU in vectors of 512 bits (`compiling.py`) is wrong where it knows that x
    is one, as it is for `atan`. So it is not to know that; where y is NaN, so is the result.
    """
    return jnp.arctan2(y, jnp.where(jnp.isnan(y), y, x))


_binary(("maximum",), jnp.maximum)
_binary(("minimum",), jnp.minimum)
_binary(("fmax",), jnp.fmax)
_binary(("fmin",), jnp.fmin)
_binary(("gcd",), jnp.gcd)
_binary(("lcm",), lambda a, b: jnp.abs(jnp.lcm(a, b)))
_binary(("atan2",), arctan2, as_float)
_binary(("hypot",), jnp.hypot, as_float)
_binary(("copysign.Tensor", "copysign.Scalar"), jnp.copysign, as_float)
_binary(("nextafter",), jnp.nextafter)
_binary(("bitwise_and.Tensor", "bitwise_and.Scalar", "bitwise_and.Scalar_Tensor"), jnp.bitwise_and)
_binary(("bitwise_or.Tensor", "bitwise_or.Scalar", "bitwise_or.Scalar_Tensor"), jnp.bitwise_or)
_binary(("bitwise_xor.Tensor", "bitwise_xor.Scalar", "bitwise_xor.Scalar_Tensor"), jnp.bitwise_xor)
_binary(("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor"), jnp.remainder)
_binary(("fmod.Tensor", "fmod.Scalar"), lambda a, b: lax.rem(*jnp.broadcast_arrays(a, b)))
_binary(("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other"), _times(jnp.log), as_float)
_XLOG1PY = ("special_xlog1py", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar")
_binary(_XLOG1PY, _times(jnp.log1p), as_float)
_binary(("special_zeta",), special.zeta, as_float)
_binary(("igamma",), special.gammainc, as_float)
_binary(("igammac",), special.gammaincc, as_float)
_binary(("complex",), lax.complex, jnp.broadcast_arrays)
_SHIFTS = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
_OF_PYTHON = ("Tensor", "Scalar")  # what `<<` and `>>` call
for _word, _letter, _shift in (("left", "l", _shift_left), ("right", "r", _shift_right)):
    _named = (*(f"bitwise_{_word}_shift.{o}" for o in _SHIFTS),)
    _binary((*_named, *(f"__{_letter}shift__.{o}" for o in _OF_PYTHON)), _shift)


@implements("addcmul")
def _add_product(start: Any, left: Any, right: Any, value: Any = 1) -> jax.Array:
    s, a, b = promote(start, left, right, wide=True)
    return s + _scaled(a, cast(value, a.dtype) if value != 1 else 1) * b


@implements("addcdiv")
def _add_quotient(start: Any, left: Any, right: Any, value: Any = 1) -> jax.Array:
    s, a, b = as_float(start, left, right, wide=True)
    return s + quotient(_scaled(a, value), b)


@implements("clamp", "clamp.Tensor", "clamp_min", "clamp_min.Tensor")
def _clamp(value: jax.Array, low: Any = None, high: Any = None) -> jax.Array:
    dtype = result_type(value, low, high)
    value = cast(value, dtype)
    if low is not None:
        value = jnp.maximum(value, cast(low, dtype))
    return value if high is None else jnp.minimum(value, cast(high, dtype))


implements("clamp_max", "clamp_max.Tensor")(lambda value, high: _clamp(value, None, high))
