"""Derivatives of activation functions that PyTorch does not write with other operators."""

from typing import Any

import jax
import jax.numpy as jnp

from mpxla.device.pjrt.dtypes import cast
from mpxla.device.pjrt.table import implements


@implements("hardshrink_backward", "softshrink_backward")
def _shrink_backward(gradient: jax.Array, x: jax.Array, lambd: Any) -> jax.Array:
    is_inside = (x >= -lambd) & (x <= lambd)
    return jnp.where(is_inside, cast(0, gradient.dtype), gradient)
