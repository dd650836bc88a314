"""Pooling in one to three dimensions, and its derivatives.

A window is read offset by offset, each as a strided slice of the padded input: [offsets, ...].
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch._meta_registrations import pooling_output_shape

from mpxla.device.pjrt.operators.arithmetic import quotient
from mpxla.device.pjrt.table import implements

Sizes = int | Sequence[int]


def spread(values: Sizes, count: int) -> list[int]:
    """One value for each dimension, where PyTorch allows one for all."""
    found = [values] if isinstance(values, int) else list(values)
    return found * (count // len(found))


def backward_of(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Its derivative by the first argument, called with the gradient and then what it is called."""

    def backward(gradient: jax.Array, x: jax.Array, *settings: Any) -> jax.Array:
        return jax.vjp(lambda v: function(v, *settings), x)[1](gradient)[0]

    return backward


class _Windows:
    """Where the windows of a pooling lie.

    Args:
        shape: of the input's last dimensions.
        settings: window, stride, padding, dilation; one number or one for each dimension.
        ceil: whether windows may go over the end.
    """

    def __init__(self, shape: Sequence[int], settings: Sequence[Any], ceil: bool):
        rank = len(shape)
        self.shape = tuple(shape)
        window, stride, padding, dilation = settings
        self.window = spread(window, rank)
        if stride is None or (isinstance(stride, Sequence) and not len(stride)):
            stride = window
        self.stride = spread(stride, rank)
        self.padding = spread(padding, rank)
        self.dilation = spread(dilation, rank)
        parts = zip(shape, self.window, self.padding, self.stride, self.dilation, strict=True)
        self.counts = tuple(pooling_output_shape(*part, ceil) for part in parts)

    def starts(self, dim: int) -> np.ndarray:
        """First places of the windows along a dimension; negative in the margin."""
        return np.arange(self.counts[dim]) * self.stride[dim] - self.padding[dim]

    def offsets(self) -> list[tuple[int, ...]]:
        """Offsets of a window's places from its first."""
        return list(itertools.product(*(range(k) for k in self.window)))

    def padded(self, x: jax.Array, value: object) -> jax.Array:
        """The input with margins wide enough for all windows."""
        config = [(0, 0, 0)] * (x.ndim - len(self.shape))
        for dim, size in enumerate(self.shape):
            last = int(self.starts(dim)[-1]) + self.dilation[dim] * (self.window[dim] - 1)
            config.append((self.padding[dim], max(0, last - size + 1), 0))
        return lax.pad(x, jnp.asarray(value, x.dtype), config)

    def slices(self, x: jax.Array, value: object) -> list[jax.Array]:
        """For every offset, what the windows hold there: [..., counts]."""
        padded = self.padded(x, value)
        before = x.ndim - len(self.shape)
        found = []
        for offset in self.offsets():
            first = [o * d for o, d in zip(offset, self.dilation, strict=True)]
            last = [
                f + (n - 1) * s + 1 for f, n, s in zip(first, self.counts, self.stride, strict=True)
            ]
            found.append(
                lax.slice(
                    padded,
                    (*[0] * before, *first),
                    (*x.shape[:before], *last),
                    (*[1] * before, *self.stride),
                )
            )
        return found

    def places(self) -> np.ndarray:
        """Flat places in the input, -1 in the margin: [offsets, counts]."""
        with jax.ensure_compile_time_eval():
            flat = jnp.arange(math.prod(self.shape)).reshape(self.shape)
            return np.stack(self.slices(flat, -1))

    def sizes(self, counts_margin: bool) -> np.ndarray:
        """How many places each window has for an average: [counts]."""
        total = np.ones((1,) * len(self.shape), np.int64)
        for dim, size in enumerate(self.shape):
            first = self.starts(dim)
            last = np.minimum(first + self.window[dim], size + self.padding[dim])
            if not counts_margin:
                first, last = np.maximum(first, 0), np.minimum(last, size)
            total = total * self._only_along(dim, last - first)
        return total

    def _only_along(self, dim: int, values: np.ndarray) -> np.ndarray:
        """Numbers by one dimension's windows, to be broadcast over the others."""
        return values.reshape([-1 if d == dim else 1 for d in range(len(self.shape))])


def _max_pool(
    rank: int,
    x: jax.Array,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    windows = _Windows(x.shape[-rank:], (kernel_size, stride, padding, dilation), ceil_mode)
    least = -np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min
    stacked = jnp.stack(windows.slices(x, least))
    places = windows.places()
    places = places.reshape(len(places), *[1] * (x.ndim - rank), *windows.counts)
    best = jnp.argmax(stacked, 0)[None]
    if (places < 0).any():  # a margin is never the place of a maximum, not even among -inf
        is_in = jnp.take_along_axis(jnp.asarray(places), best, 0) >= 0
        best = jnp.where(is_in, best, np.argmax(places >= 0, 0))
    return jnp.max(stacked, 0), jnp.take_along_axis(jnp.asarray(places), best, 0)[0]


def _max_backward(rank: int, gradient: jax.Array, x: jax.Array, *settings: Any) -> jax.Array:
    """Adds the gradient where the maxima were, which the last of the settings says."""
    rows = math.prod(x.shape[:-rank])
    flat = jnp.zeros((rows, math.prod(x.shape[-rank:])), gradient.dtype)
    where = np.arange(rows)[:, None], settings[-1].reshape(rows, -1)
    return flat.at[where].add(gradient.reshape(rows, -1)).reshape(x.shape)


def _avg_pool(
    rank: int,
    x: jax.Array,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> jax.Array:
    windows = _Windows(x.shape[-rank:], (kernel_size, stride, padding, 1), ceil_mode)
    wide = x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "iu" else x
    total = lax.reduce_window(
        windows.padded(wide, 0),
        np.zeros((), wide.dtype),
        lax.add,
        (*[1] * (x.ndim - rank), *windows.window),
        (*[1] * (x.ndim - rank), *windows.stride),
        "VALID",
    )
    total = total[(..., *(slice(count) for count in windows.counts))]
    sizes = divisor_override or jnp.asarray(windows.sizes(count_include_pad), wide.dtype)
    return quotient(total, sizes).astype(x.dtype)


def _bounds(size: int, count: int) -> list[tuple[int, int]]:
    """First and last place + 1 of the parts that adaptive pooling cuts a dimension into."""
    return [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


def _adaptive_average(rank: int, x: jax.Array, output_size: Sequence[int]) -> jax.Array:
    for dim, count in zip(range(x.ndim - rank, x.ndim), output_size, strict=True):
        parts = [
            jnp.mean(lax.slice_in_dim(x, a, b, axis=dim), dim, keepdims=True)
            for a, b in _bounds(x.shape[dim], count)
        ]
        x = jnp.concatenate(parts, dim) if parts else lax.slice_in_dim(x, 0, 0, axis=dim)
    return x


def _adaptive_average_backward(rank: int, gradient: jax.Array, x: jax.Array) -> jax.Array:
    return backward_of(partial(_adaptive_average, rank))(gradient, x, gradient.shape[-rank:])


def _adaptive_max(rank: int, x: jax.Array, output_size: Sizes) -> tuple[jax.Array, jax.Array]:
    counts = spread(output_size, rank)
    shape = x.shape[-rank:]
    bounds = [_bounds(size, count) for size, count in zip(shape, counts, strict=True)]
    flat = np.arange(math.prod(shape)).reshape(shape)
    values, places = [], []
    for part in itertools.product(*bounds):
        where = tuple(slice(a, b) for a, b in part)
        piece = x[(..., *where)].reshape(*x.shape[:-rank], -1)
        values.append(jnp.max(piece, -1))
        places.append(jnp.asarray(flat[where].reshape(-1))[jnp.argmax(piece, -1)])
    result = (*x.shape[:-rank], *counts)
    return jnp.stack(values, -1).reshape(result), jnp.stack(places, -1).reshape(result)


for _rank in (2, 3):
    for _name, _function in (
        ("max_pool{}d_with_indices", _max_pool),
        ("max_pool{}d_with_indices_backward", _max_backward),
        ("avg_pool{}d", _avg_pool),
        ("_adaptive_avg_pool{}d", _adaptive_average),
        ("_adaptive_avg_pool{}d_backward", _adaptive_average_backward),
        ("adaptive_max_pool{}d", _adaptive_max),
        ("adaptive_max_pool{}d_backward", _max_backward),
    ):
        implements(_name.format(_rank))(partial(_function, _rank))
    implements(f"avg_pool{_rank}d_backward")(backward_of(partial(_avg_pool, _rank)))
