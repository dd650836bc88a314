"""Products of matrices, and attention. Those of low precision are summed in float32."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpxla.device.pjrt.dtypes import cast, compute_dtype, promote
from mpxla.device.pjrt.table import implements


def _wide_product(left: jax.Array, right: jax.Array) -> jax.Array:
    wide = compute_dtype(left.dtype)
    wanted = wide if wide != left.dtype else None
    return jnp.matmul(left, right, preferred_element_type=wanted)


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    """A product of matrices or batches of them, in the dtype of the operands."""
    return _wide_product(left, right).astype(left.dtype)


implements("mm", "bmm", "mv")(product)


def _sum(start: jax.Array, added: jax.Array, beta: Any, alpha: Any) -> jax.Array:
    """beta start + alpha added, rounded once; with beta 0, NaN in `start` does not count."""
    start, added = promote(start, added)
    added = added if alpha == 1 else added * cast(alpha, added.dtype)
    if beta == 0:
        return jnp.broadcast_to(added, jnp.broadcast_shapes(start.shape, added.shape))
    return (start if beta == 1 else start * cast(beta, start.dtype)) + added


def _added(multiply: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    return lambda start, left, right, *, beta=1, alpha=1: _sum(
        start, multiply(left, right), beta, alpha
    )


implements("addmm", "addmv", "baddbmm")(_added(_wide_product))
implements("addbmm")(_added(lambda left, right: jnp.sum(product(left, right), 0)))


@implements("_int_mm")
def _int_mm(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, preferred_element_type=np.int32)


@implements("_trilinear")
def _trilinear(
    first: jax.Array,
    second: jax.Array,
    third: jax.Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> jax.Array:
    parts = zip((first, second, third), (expand1, expand2, expand3), strict=True)
    a, b, c = (jnp.expand_dims(x, tuple(sorted(dims))) for x, dims in parts)
    return jnp.sum(a * b * c, tuple(sumdim))
