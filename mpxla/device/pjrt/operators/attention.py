"""Scaled dot-product attention in its plain form.

Lowering writes attention with products and softmax; these are for graphs traced elsewhere.
"""

import math

import jax
import jax.numpy as jnp

from mpxla.device.pjrt.operators.products import product
from mpxla.device.pjrt.table import implements


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
    """[..., L, E], [..., S, E], [..., S, V] -> [..., L, V]."""
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
