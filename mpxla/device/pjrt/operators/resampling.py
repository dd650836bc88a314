"""Other sizes of images: nearest and linear interpolation, and its derivatives.

Cubic and grid sampling are PyTorch's decompositions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpxla.device.pjrt.operators.pooling import backward_of
from mpxla.device.pjrt.table import implements


def _ratio(size: int, count: int, factor: float | None) -> np.float32:
    """Input places per output place, in the precision that PyTorch computes places in."""
    if factor is not None and factor > 0:
        return np.float32(1.0 / factor)
    return np.float32(size) / np.float32(count)


def _nearest(
    x: jax.Array, counts: Sequence[int], factors: Sequence[float | None], is_exact: bool
) -> jax.Array:
    """[B, C, ...] at the nearest places."""
    for i, (count, factor) in enumerate(zip(counts, factors, strict=True)):
        size = x.shape[2 + i]
        places = np.arange(count, dtype=np.float32) + np.float32(0.5 if is_exact else 0)
        index = np.minimum(
            np.floor(places * _ratio(size, count, factor)).astype(np.int64), size - 1
        )
        x = jnp.take(x, index, 2 + i)
    return x


def _linear(
    x: jax.Array, counts: Sequence[int], factors: Sequence[float | None], align: bool
) -> jax.Array:
    """[B, C, ...] between the nearest two places of each dimension."""
    for i, (count, factor) in enumerate(zip(counts, factors, strict=True)):
        size = x.shape[2 + i]
        if size == count:
            continue
        steps = np.arange(count, dtype=np.float32)
        if align:
            places = steps * np.float32((size - 1) / (count - 1) if count > 1 else 0)
        else:
            ratio = _ratio(size, count, factor)
            places = np.maximum((steps + np.float32(0.5)) * ratio - np.float32(0.5), 0)
        low = np.minimum(places.astype(np.int64), size - 1)
        high = np.minimum(low + 1, size - 1)
        share = jnp.asarray(np.clip(places - low, 0, 1), x.dtype)
        share = share.reshape(-1, *[1] * (x.ndim - 3 - i))
        x = jnp.take(x, low, 2 + i) * (1 - share) + jnp.take(x, high, 2 + i) * share
    return x


def _register(name: str, rank: int, resample: Callable[..., jax.Array], num_settings: int) -> None:
    """Puts an operator and its derivative into the table; settings are between size and factors."""

    def resampled(x: jax.Array, size: Sequence[int], *rest: Any) -> jax.Array:
        factors = rest[num_settings:] or [None] * rank
        return resample(x, size, factors, *rest[:num_settings])

    @implements(f"{name}_backward")
    def _backward(
        gradient: jax.Array, size: Sequence[int], input_size: Sequence[int], *rest: Any
    ) -> jax.Array:
        zeros = jnp.zeros(input_size, gradient.dtype)
        return jax.vjp(lambda x: resampled(x, size, *rest), zeros)[1](gradient)[0]

    implements(name)(resampled)


for _rank, _name in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d")):
    _register(f"upsample_{_name}", _rank, _linear, 1)
    _register(f"upsample_nearest{_rank}d", _rank, partial(_nearest, is_exact=False), 0)
    _register(f"_upsample_nearest_exact{_rank}d", _rank, partial(_nearest, is_exact=True), 0)


def _mirror(size: int, before: int, after: int) -> np.ndarray:
    """Places that a reflection about the outermost values reads."""
    places = np.abs(np.arange(-before, size + after))
    return np.where(places >= size, 2 * (size - 1) - places, places)


def _edge(size: int, before: int, after: int) -> np.ndarray:
    return np.clip(np.arange(-before, size + after), 0, size - 1)


def _padded(
    places: Callable[[int, int, int], np.ndarray], x: jax.Array, padding: Sequence[int]
) -> jax.Array:
    for i in range(len(padding) // 2):
        dim = x.ndim - 1 - i
        x = jnp.take(x, places(x.shape[dim], padding[2 * i], padding[2 * i + 1]), dim)
    return x


for _rank in (1, 2, 3):
    for _name, _places in (("reflection", _mirror), ("replication", _edge)):
        _pad = implements(f"{_name}_pad{_rank}d")(partial(_padded, _places))
        implements(f"{_name}_pad{_rank}d_backward")(backward_of(_pad))
