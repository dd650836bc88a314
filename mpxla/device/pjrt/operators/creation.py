"""Tensors made from numbers.

A tensor without values (`empty`) is one of zeros here.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._ops import OpOverload

from mpxla.device.pjrt.arrays import from_constant
from mpxla.device.pjrt.dtypes import cast, jax_dtype
from mpxla.device.pjrt.table import implements


def _dtype(dtype: torch.dtype | None, other: np.dtype | None = None) -> np.dtype:
    if dtype is not None:
        return jax_dtype(dtype)
    return other or jax_dtype(torch.get_default_dtype())


def _number_dtype(number: Any, dtype: torch.dtype | None) -> np.dtype:
    if dtype is not None:
        return jax_dtype(dtype)
    if isinstance(number, (bool, int)):
        return np.dtype(bool if isinstance(number, bool) else np.int64)
    return jax_dtype(torch.get_default_dtype())


def _filled(shape: Sequence[int], value: Any, dtype: np.dtype) -> jax.Array:
    return jnp.broadcast_to(cast(value, dtype), tuple(shape))


@implements("full")
def _full(shape: Sequence[int], value: Any, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _filled(shape, value, _number_dtype(value, dtype))


@implements("scalar_tensor")
def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None) -> jax.Array:
    return cast(value, _dtype(dtype))


@implements("full_like")
def _full_like(x: jax.Array, value: Any, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _filled(x.shape, value, _dtype(dtype, x.dtype))


@implements("new_full")
def _new_full(
    x: jax.Array, shape: Sequence[int], value: Any, *, dtype: torch.dtype | None = None
) -> jax.Array:
    return _filled(shape, value, _dtype(dtype, x.dtype))


@implements("fill.Scalar", "fill.Tensor")
def _fill(x: jax.Array, value: Any) -> jax.Array:
    return _filled(x.shape, value, x.dtype)


def _constant(value: int, plain: tuple[str, ...], like: str, new: str) -> None:
    @implements(*plain)
    def _plain(shape: Sequence[int], *, dtype: torch.dtype | None = None) -> jax.Array:
        return _filled(shape, value, _dtype(dtype))

    @implements(like)
    def _like(x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
        return _filled(x.shape, value, _dtype(dtype, x.dtype))

    @implements(new)
    def _new(x: jax.Array, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> jax.Array:
        return _filled(shape, value, _dtype(dtype, x.dtype))


_constant(0, ("zeros", "_efficientzerotensor"), "zeros_like", "new_zeros")
_constant(1, ("ones",), "ones_like", "new_ones")
_constant(0, ("empty.memory_format",), "empty_like", "new_empty")


@implements("empty_strided", "empty_permuted")
def _empty(
    shape: Sequence[int], _: Sequence[int], *, dtype: torch.dtype | None = None
) -> jax.Array:
    return _filled(shape, 0, _dtype(dtype))


@implements("new_empty_strided")
def _new_empty(
    x: jax.Array, shape: Sequence[int], _: Sequence[int], *, dtype: torch.dtype | None = None
) -> jax.Array:
    return _filled(shape, 0, _dtype(dtype, x.dtype))


@implements("arange")
def _arange(end: Any, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _range(0, end, 1, dtype)


@implements("arange.start")
def _arange_from(start: Any, end: Any, *, dtype: torch.dtype | None = None) -> jax.Array:
    return _range(start, end, 1, dtype)


@implements("arange.start_step")
def _range(start: Any, end: Any, step: Any = 1, dtype: torch.dtype | None = None) -> jax.Array:
    is_integer = all(isinstance(v, int) for v in (start, end, step))
    wanted = np.dtype(np.int64) if is_integer and dtype is None else _dtype(dtype)
    count = max(0, int(np.ceil((end - start) / step)))
    if wanted.kind in "iu":
        first, by = int(start), int(step)
        return (first + by * jnp.arange(count, dtype=np.int64)).astype(wanted)
    return (start + step * jnp.arange(count, dtype=np.float64)).astype(wanted)


@implements("linspace")
def _linspace(start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    wanted = _dtype(dtype)
    if wanted.kind in "iu":
        step = (end - start) / (steps - 1) if steps > 1 else 0.0
        places = jnp.arange(steps)
        up, down = start + step * places, end - step * (steps - places - 1)
        return jnp.trunc(jnp.where(places < max(1, steps // 2), up, down)).astype(wanted)
    return jnp.linspace(start, end, steps, dtype=wanted)


@implements("logspace")
def _logspace(
    start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: torch.dtype | None = None
) -> jax.Array:
    return jnp.power(base, jnp.linspace(start, end, steps, dtype=np.float64)).astype(_dtype(dtype))


@implements("eye")
def _eye(count: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    return jnp.eye(count, dtype=_dtype(dtype))


@implements("eye.m")
def _eye_of_columns(count: int, columns: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    return jnp.eye(count, columns, dtype=_dtype(dtype))


def _window(operator: OpOverload, *args: Any, dtype: torch.dtype | None = None) -> jax.Array:
    """One of PyTorch's windows, as a constant: nothing in it depends on tensors."""
    return from_constant(operator(*args, dtype=dtype))


_WINDOWS = {
    "bartlett_window": ("default", "periodic"),
    "blackman_window": ("default", "periodic"),
    "hamming_window": ("default", "periodic", "periodic_alpha", "periodic_alpha_beta"),
    "hann_window": ("default", "periodic"),
    "kaiser_window": ("default", "periodic", "beta"),
}
for _name, _overloads in _WINDOWS.items():
    for _overload in _overloads:
        _operator = getattr(getattr(torch.ops.aten, _name), _overload)
        implements(f"{_name}.{_overload}")(functools.partial(_window, _operator))


def _triangle(rows: int, columns: int, offset: int, is_lower: bool) -> jax.Array:
    mask = np.tri(rows, columns, offset if is_lower else offset - 1, dtype=bool)
    return jnp.asarray(np.stack(np.nonzero(mask if is_lower else ~mask)))


@implements("tril_indices")
def _tril_indices(
    rows: int, columns: int, offset: int = 0, *, dtype: torch.dtype | None = torch.long
) -> jax.Array:
    return _triangle(rows, columns, offset, True).astype(_dtype(dtype))


@implements("triu_indices")
def _triu_indices(
    rows: int, columns: int, offset: int = 0, *, dtype: torch.dtype | None = torch.long
) -> jax.Array:
    return _triangle(rows, columns, offset, False).astype(_dtype(dtype))
