"""Other sizes of images: nearest and linear interpolation, and its derivatives.

Cubic and grid sampling are PyTorch's decompositions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpxla.device.pjrt.table import implements


def _output_size(
    shape: Sequence[int], size: Sequence[int] | None, factors: Sequence[float] | None
) -> list[int]:
    if size is not None:
        return list(size)
    return [math.floor(n * f) for n, f in zip(shape, factors or (), strict=True)]


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


def _register_nearest(name: str, rank: int, is_exact: bool) -> None:
    @implements(name)
    def _sized(x: jax.Array, size: Sequence[int], *factors: float | None) -> jax.Array:
        return _nearest(x, size, factors or [None] * rank, is_exact)

    @implements(f"{name}.vec")
    def _vector(
        x: jax.Array, size: Sequence[int] | None, factors: Sequence[float] | None
    ) -> jax.Array:
        counts = _output_size(x.shape[2:], size, factors)
        return _nearest(x, counts, factors or [None] * rank, is_exact)

    @implements(f"{name}_backward")
    def _backward(
        gradient: jax.Array,
        output_size: Sequence[int],
        input_size: Sequence[int],
        *factors: float | None,
    ) -> jax.Array:
        def forward(x: jax.Array) -> jax.Array:
            return _nearest(x, output_size, factors or [None] * rank, is_exact)

        return jax.vjp(forward, jnp.zeros(input_size, gradient.dtype))[1](gradient)[0]


for _rank in (1, 2, 3):
    _register_nearest(f"upsample_nearest{_rank}d", _rank, False)
    _register_nearest(f"_upsample_nearest_exact{_rank}d", _rank, True)


def _linear(
    x: jax.Array, counts: Sequence[int], align: bool, factors: Sequence[float | None]
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


def _register_linear(name: str, rank: int) -> None:
    @implements(name)
    def _sized(x: jax.Array, size: Sequence[int], align: bool, *factors: float | None) -> jax.Array:
        return _linear(x, size, align, factors or [None] * rank)

    @implements(f"{name}.vec")
    def _vector(
        x: jax.Array, size: Sequence[int] | None, align: bool, factors: Sequence[float] | None
    ) -> jax.Array:
        counts = _output_size(x.shape[2:], size, factors)
        return _linear(x, counts, align, factors or [None] * rank)

    @implements(f"{name}_backward")
    def _backward(
        gradient: jax.Array,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align: bool,
        *factors: float | None,
    ) -> jax.Array:
        def forward(x: jax.Array) -> jax.Array:
            return _linear(x, output_size, align, factors or [None] * rank)

        return jax.vjp(forward, jnp.zeros(input_size, gradient.dtype))[1](gradient)[0]


for _name, _rank in (("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3)):
    _register_linear(f"upsample_{_name}", _rank)


def _mirror(size: int, before: int, after: int) -> np.ndarray:
    """Places that a reflection about the outermost values reads."""
    places = np.abs(np.arange(-before, size + after))
    return np.where(places >= size, 2 * (size - 1) - places, places)


def _edge(size: int, before: int, after: int) -> np.ndarray:
    return np.clip(np.arange(-before, size + after), 0, size - 1)


def _padded(
    x: jax.Array, padding: Sequence[int], places: Callable[[int, int, int], np.ndarray]
) -> jax.Array:
    for i in range(len(padding) // 2):
        dim = x.ndim - 1 - i
        x = jnp.take(x, places(x.shape[dim], padding[2 * i], padding[2 * i + 1]), dim)
    return x


def _register_padding(name: str, places: Callable[[int, int, int], np.ndarray]) -> None:
    @implements(name)
    def _forward(x: jax.Array, padding: Sequence[int]) -> jax.Array:
        return _padded(x, padding, places)

    @implements(f"{name}_backward")
    def _backward(gradient: jax.Array, x: jax.Array, padding: Sequence[int]) -> Any:
        return jax.vjp(lambda v: _padded(v, padding, places), x)[1](gradient)[0]


for _rank in (1, 2, 3):
    _register_padding(f"reflection_pad{_rank}d", _mirror)
    _register_padding(f"replication_pad{_rank}d", _edge)
