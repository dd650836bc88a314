"""Losses that PyTorch does not write with other operators, and their derivatives.

Reductions are PyTorch's numbers: 0 none, 1 mean, 2 sum.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mpxla.device.pjrt.table import implements


def _weights(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, ignored: int
) -> tuple[jax.Array, jax.Array]:
    """Targets without the ignored, and the weight of each; `x` is [N, C, ...]."""
    is_counted = target != ignored
    safe = jnp.where(is_counted, target, 0)
    found = jnp.ones((), x.dtype) if weight is None else weight[safe]
    return safe, jnp.where(is_counted, found, 0).astype(x.dtype)


@implements("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignored: int
) -> tuple[jax.Array, jax.Array]:
    """Of [N, C, ...] and [N, ...], or [C] and []; the loss and the sum of the weights."""
    if x.ndim == 1:
        loss, total = _nll_loss(x[None], target.reshape(1), weight, reduction, ignored)
        return loss.reshape(()), total
    safe, weights = _weights(x, target, weight, ignored)
    # A class out of range gives NaN, where PyTorch raises an error.
    chosen = jnp.take_along_axis(x, safe[:, None], 1, mode="fill")[:, 0]
    losses = -chosen * weights
    # With NaN or infinity at an ignored target too.
    losses = jnp.where(target == ignored, 0, losses)
    if reduction == 0:
        return losses, jnp.zeros((), x.dtype)
    total = jnp.sum(weights)
    return (jnp.sum(losses) / total if reduction == 1 else jnp.sum(losses)), total


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
    if x.ndim == 1:
        row = gradient.reshape(1) if reduction == 0 else gradient
        settings = (weight, reduction, ignored, total)
        return _nll_loss_backward(row, x[None], target.reshape(1), *settings)[0]
    safe, weights = _weights(x, target, weight, ignored)
    values = -weights * (gradient / total if reduction == 1 else gradient)
    values = jnp.where(target == ignored, 0, values)
    classes = np.arange(x.shape[1]).reshape(1, -1, *[1] * (x.ndim - 2))
    return jnp.where(classes == safe[:, None], values[:, None], 0).astype(x.dtype)
