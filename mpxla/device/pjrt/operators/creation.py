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
from mpxla.device.pjrt.dtypes import cast, dtype_or, shape_and_dtype, torch_dtype
from mpxla.device.pjrt.table import implements


@implements("full_like", "fill.Scalar", "fill.Tensor")
def _filled(
    like: jax.Array | Sequence[int], value: Any, *, dtype: torch.dtype | None = None
) -> jax.Array:
    shape, wanted = shape_and_dtype(like, dtype)
    return jnp.broadcast_to(cast(value, wanted), shape)


@implements("full")
def _full(shape: Sequence[int], value: Any, *, dtype: torch.dtype | None = None) -> jax.Array:
    if isinstance(value, (bool, int)):
        dtype = dtype or (torch.bool if isinstance(value, bool) else torch.int64)
    return _filled(shape, value, dtype=dtype)


@implements("new_full")
def _new_full(
    x: jax.Array, shape: Sequence[int], value: Any, *, dtype: torch.dtype | None = None
) -> jax.Array:
    return _filled(shape, value, dtype=dtype or torch_dtype(x.dtype))


@implements("scalar_tensor")
def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None) -> jax.Array:
    return cast(value, dtype_or(dtype))


for _value, _plain, _new in (
    (0, ("zeros", "zeros_like", "_efficientzerotensor"), ("new_zeros",)),
    (1, ("ones", "ones_like"), ("new_ones",)),
    # What follows the shape of these says how they lie in memory.
    (
        0,
        ("empty.memory_format", "empty_like", "empty_strided", "empty_permuted"),
        ("new_empty", "new_empty_strided"),
    ),
):
    implements(*_plain)(lambda like, *_, v=_value, dtype=None: _filled(like, v, dtype=dtype))
    implements(*_new)(
        lambda x, shape, *_, v=_value, dtype=None: _new_full(x, shape, v, dtype=dtype)
    )


implements("arange")(lambda end, *, dtype=None: _range(0, end, dtype=dtype))


@implements("arange.start", "arange.start_step")
def _range(start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None) -> jax.Array:
    is_integer = all(isinstance(v, int) for v in (start, end, step))
    wanted = np.dtype(np.int64) if is_integer and dtype is None else dtype_or(dtype)
    count = max(0, int(np.ceil((end - start) / step)))
    if wanted.kind in "iu":
        first, by = int(start), int(step)
        return (first + by * jnp.arange(count, dtype=np.int64)).astype(wanted)
    return (start + step * jnp.arange(count, dtype=np.float64)).astype(wanted)


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


def _triangle(
    is_lower: bool,
    rows: int,
    columns: int,
    offset: int = 0,
    *,
    dtype: torch.dtype | None = torch.long,
) -> jax.Array:
    mask = np.tri(rows, columns, offset if is_lower else offset - 1, dtype=bool)
    found = np.stack(np.nonzero(mask if is_lower else ~mask))
    return jnp.asarray(found).astype(dtype_or(dtype))


implements("tril_indices")(functools.partial(_triangle, True))
implements("triu_indices")(functools.partial(_triangle, False))
