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
from mpxla.device.pjrt.dtypes import cast, dtype_or, shape_and_dtype
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


@implements("scalar_tensor")
def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None) -> jax.Array:
    return cast(value, dtype_or(dtype))


for _value, _names in (
    (0, ("zeros", "zeros_like", "_efficientzerotensor")),
    (1, ("ones", "ones_like")),
    # What follows the shape of these says how they lie in memory.
    (0, ("empty.memory_format", "empty_like", "empty_strided", "empty_permuted")),
):
    implements(*_names)(lambda like, *_, v=_value, dtype=None: _filled(like, v, dtype=dtype))


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


def _constant(operator: OpOverload, *args: Any, dtype: torch.dtype | None = None) -> jax.Array:
    """What PyTorch makes of numbers alone, as a constant."""
    return from_constant(operator(*args, dtype=dtype))


_CONSTANTS = (
    *("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window"),
    *("tril_indices", "triu_indices"),
)
for _name in _CONSTANTS:
    _packet = getattr(torch.ops.aten, _name)
    for _overload in _packet.overloads():
        if not _overload.endswith("out"):
            _operator = getattr(_packet, _overload)
            implements(f"{_name}.{_overload}")(functools.partial(_constant, _operator))
