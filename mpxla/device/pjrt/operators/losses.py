"""Derivatives of losses. Reductions are PyTorch's numbers: 0 none, 1 mean, 2 sum."""

import jax
import jax.numpy as jnp
import numpy as np

from mpxla.device.pjrt.table import implements


@implements("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(
    gradient: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignored: int,
    total: jax.Array,
) -> jax.Array:
    """Of [N, C, ...] and [N, ...], or [C] and []; without a scatter, XLA fuses it with others."""
    if x.ndim == 1:
        row = gradient.reshape(1) if reduction == 0 else gradient
        settings = (weight, reduction, ignored, total)
        return _nll_loss_backward(row, x[None], target.reshape(1), *settings)[0]
    is_counted = target != ignored
    safe = jnp.where(is_counted, target, 0)
    values = -(gradient / total if reduction == 1 else gradient)
    values = values if weight is None else values * weight[safe]
    values = jnp.where(is_counted, values, 0)
    classes = np.arange(x.shape[1]).reshape(1, -1, *[1] * (x.ndim - 2))
    return jnp.where(classes == safe[:, None], values[:, None], 0).astype(x.dtype)
