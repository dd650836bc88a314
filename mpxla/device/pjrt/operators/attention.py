"""Scaled dot-product attention in its plain form.

Lowering writes attention with products and softmax; these are for graphs traced elsewhere.
"""

import math

import jax
import jax.numpy as jnp

from mpxla.device.pjrt.operators.products import product
from mpxla.device.pjrt.table import implements


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float | None,
) -> jax.Array:
    """[..., L, E], [..., S, E], [..., S, V] -> [..., L, V]."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = product(query, jnp.swapaxes(key, -1, -2)) * factor
    if is_causal:
        kept = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(kept, scores, -jnp.inf)
    if mask is not None:
        is_choice = mask.dtype.kind == "b"
        scores = jnp.where(mask, scores, -jnp.inf) if is_choice else scores + mask
    is_empty = jnp.all(scores == -jnp.inf, -1, keepdims=True)
    weights = jnp.where(is_empty, 0, jax.nn.softmax(scores, -1)).astype(value.dtype)
    return product(weights, value)


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
    if dropout_p:
        raise NotImplementedError("attention with dropout has to be lowered to its plain form")
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (jnp.repeat(v, times, -3) for v in (key, value))
    return _attend(query, key, value, attn_mask, is_causal, scale)
