"""Dtypes of PyTorch and of jax, and PyTorch's rules for mixing them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

__all__ = [
    "as_float",
    "cast",
    "compute_dtype",
    "dtype_or",
    "jax_dtype",
    "promote",
    "result_type",
    "shape_and_dtype",
    "torch_dtype",
    "widened",
]

# `jax.numpy` names them as torch does, except the first.
_JAX: dict[torch.dtype, np.dtype] = {torch.bool: np.dtype(np.bool_)} | {
    getattr(torch, name): np.dtype(getattr(jnp, name))
    for name in (
        *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
}
_TORCH = {dtype: key for key, dtype in _JAX.items()}


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """Jax's dtype for one of PyTorch's."""
    try:
        return _JAX[dtype]
    except KeyError:
        raise TypeError(f"jax has no dtype for {dtype}") from None


def dtype_or(dtype: torch.dtype | None, other: np.dtype | None = None) -> np.dtype:
    """Jax's dtype for one of PyTorch's, if it is given; else the other one, or the default."""
    if dtype is None and other is not None:
        return other
    return jax_dtype(dtype or torch.get_default_dtype())


def shape_and_dtype(
    like: jax.Array | Sequence[int], dtype: torch.dtype | None = None
) -> tuple[tuple[int, ...], np.dtype]:
    """Of a new array that is like another one, or has a given shape."""
    if isinstance(like, jax.Array):
        return like.shape, dtype_or(dtype, like.dtype)
    return tuple(like), dtype_or(dtype)


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """PyTorch's dtype for one of jax's."""
    return _TORCH[np.dtype(dtype)]


def result_type(*values: Any) -> np.dtype:
    """The dtype in which PyTorch computes with arrays and Python numbers together."""
    stand_ins = [
        torch.empty((0,) * v.ndim, dtype=torch_dtype(v.dtype), device="meta")
        if hasattr(v, "dtype")
        else v
        for v in values
        if v is not None
    ]
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH
    return jax_dtype(elementwise_dtypes(*stand_ins, type_promotion_kind=kind)[1])


def cast(value: Any, dtype: np.dtype | torch.dtype) -> jax.Array:
    """An array or number as an array of this dtype."""
    wanted = jax_dtype(dtype) if isinstance(dtype, torch.dtype) else dtype
    if isinstance(value, int) and not isinstance(value, bool) and wanted.kind in "iu":
        value = np.array(value & (2 ** (8 * wanted.itemsize) - 1), np.uint64).astype(wanted)
    return jnp.asarray(value, wanted)


def promote(*values: Any, wide: bool = False) -> list[jax.Array]:
    """All values in the dtype of PyTorch's result.

    Args:
        values: arrays and Python numbers.
        wide: whether low precision becomes float32, in which PyTorch multiplies bfloat16 by 0.1,
            not by the bfloat16 next to it; who calls casts the result then.
    """
    dtype = result_type(*values)
    dtype = compute_dtype(dtype) if wide else dtype
    return [cast(value, dtype) for value in values]


def as_float(*values: Any, wide: bool = False) -> list[jax.Array]:
    """As `promote`; integers and booleans become numbers of the default dtype."""
    dtype = result_type(*values)
    if dtype.kind in "biu":
        dtype = jax_dtype(torch.get_default_dtype())
    dtype = compute_dtype(dtype) if wide else dtype
    return [cast(value, dtype) for value in values]


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of sums over values of a low-precision dtype, as PyTorch's kernels have it."""
    return np.dtype(np.float32) if dtype.itemsize < 4 and dtype.kind not in "biu" else dtype


def widened(x: jax.Array) -> jax.Array:
    """Values of low precision in the dtype of sums over them; others as they are."""
    return x.astype(compute_dtype(x.dtype))
