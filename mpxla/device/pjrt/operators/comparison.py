"""Comparisons, logic and choice, elementwise."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpxla.device.pjrt.dtypes import cast, promote
from mpxla.device.pjrt.table import implements

_COMPARISONS: dict[str, Callable[..., jax.Array]] = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}
for _name, _function in _COMPARISONS.items():
    implements(f"{_name}.Tensor", f"{_name}.Scalar")(
        lambda left, right, f=_function: f(*promote(left, right))
    )

for _name in ("logical_and", "logical_or", "logical_xor"):
    implements(_name)(getattr(jnp, _name))


@implements("where.self")
def _where(condition: jax.Array, left: Any, right: Any) -> jax.Array:
    return jnp.where(condition.astype(bool), *promote(left, right))


@implements("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(value: jax.Array, mask: jax.Array, fill: Any) -> jax.Array:
    return jnp.where(mask, cast(fill, value.dtype), value)


@implements("hardshrink_backward", "softshrink_backward")
def _shrink_backward(gradient: jax.Array, x: jax.Array, lambd: Any) -> jax.Array:
    is_inside = (x >= -lambd) & (x <= lambd)
    return jnp.where(is_inside, cast(0, gradient.dtype), gradient)


implements("equal")(jnp.array_equal)


@implements("isin.Tensor_Tensor", "isin.Tensor_Scalar", "isin.Scalar_Tensor")
def _isin(
    elements: Any, found: Any, *, assume_unique: bool = False, invert: bool = False
) -> jax.Array:
    values, tests = promote(elements, found)
    return jnp.isin(values, tests, invert=invert)
