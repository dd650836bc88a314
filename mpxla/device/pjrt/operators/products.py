"""Products of matrices, and attention. Those of low precision are summed in float32."""

import math
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


implements("mm", "bmm", "mv", "matmul")(product)


implements("dot")(lambda left, right: jnp.sum(left * right))
implements("vdot")(lambda left, right: jnp.sum(jnp.conj(left) * right))


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
implements("addr")(_added(jnp.outer))


@implements("linear")
def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    result = _wide_product(x, weight.T)
    return result if bias is None else result + bias


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


@implements("scaled_dot_product_attention")
def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """[..., L, E], [..., S, E], [..., S, V] -> [..., L, V], in its plain form.

    Lowering writes attention with products and softmax; this is for graphs traced elsewhere.
    """
    if dropout_p:
        raise NotImplementedError("attention with dropout has to be lowered to its plain form")
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (jnp.repeat(v, times, -3) for v in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = product(query, jnp.swapaxes(key, -1, -2)) * factor
    if is_causal:
        kept = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(kept, scores, -jnp.inf)
    if attn_mask is not None:
        is_choice = attn_mask.dtype.kind == "b"
        scores = jnp.where(attn_mask, scores, -jnp.inf) if is_choice else scores + attn_mask
    is_empty = jnp.all(scores == -jnp.inf, -1, keepdims=True)
    weights = jnp.where(is_empty, 0, jax.nn.softmax(scores, -1)).astype(value.dtype)
    return product(weights, value)
