"""Shapes: views in PyTorch, plain values here; and copies between dtypes."""

import builtins
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from mpxla.device.pjrt.dtypes import cast, jax_dtype
from mpxla.device.pjrt.table import implements


@implements("view", "_unsafe_view", "view_copy", "_reshape_copy")
def _reshape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    shape = list(shape)
    if -1 in shape:
        rest = int(np.prod([s for s in shape if s != -1], dtype=np.int64))
        shape[shape.index(-1)] = x.size // rest if rest else 0
    return jnp.reshape(x, shape)


@implements("view.dtype")
def _bitcast(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    wanted = jax_dtype(dtype)
    old, new = x.dtype.itemsize, wanted.itemsize
    if new > old:
        x = x.reshape(*x.shape[:-1], -1, new // old)
    result = lax.bitcast_convert_type(x, wanted)
    return result.reshape(*result.shape[:-2], -1) if new < old else result


implements("t")(jnp.transpose)
implements("transpose.int")(lambda x, *dims: jnp.swapaxes(x, *dims) if x.ndim else x)
implements("permute", "permute_copy")(jnp.transpose)
implements("unsqueeze")(jnp.expand_dims)
implements("squeeze")(jnp.squeeze)
implements("stack")(jnp.stack)
implements("repeat")(jnp.tile)
implements("diagonal", "diagonal_copy")(jnp.diagonal)
implements("tril")(jnp.tril)
implements("triu")(jnp.triu)


@implements("squeeze.dim", "squeeze.dims")
def _squeeze_some(x: jax.Array, dims: int | Sequence[int]) -> jax.Array:
    chosen = [dims] if isinstance(dims, int) else dims
    return jnp.squeeze(x, tuple(d for d in chosen if x.ndim and x.shape[d] == 1))


@implements("expand", "expand_copy")
def _expand(x: jax.Array, shape: Sequence[int], *, implicit: bool = False) -> jax.Array:
    first = len(shape) - x.ndim
    full = [x.shape[i - first] if size == -1 else size for i, size in enumerate(shape)]
    return jnp.broadcast_to(x, full)


@implements("slice.Tensor")
def _slice(
    x: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    first, last, _ = builtins.slice(start, end).indices(x.shape[dim])
    return lax.slice_in_dim(x, first, max(first, last), step, dim % x.ndim)


@implements("select.int", "select_copy.int")
def _select(x: jax.Array, dim: int, index: int) -> jax.Array:
    return lax.index_in_dim(x, index % x.shape[dim], dim % x.ndim, keepdims=False)


@implements("split_with_sizes", "split_with_sizes_copy")
def _split_with_sizes(x: jax.Array, sizes: Sequence[int], dim: int = 0) -> list[jax.Array]:
    ends = np.cumsum([0, *sizes])
    return [
        lax.slice_in_dim(x, int(a), int(b), axis=dim % x.ndim) for a, b in itertools.pairwise(ends)
    ]


@implements("cat")
def _concatenate(parts: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    kept = [p for p in parts if p.shape != (0,)] or list(parts[:1])  # PyTorch skips those
    dtype = jnp.result_type(*parts) if len({p.dtype for p in parts}) > 1 else parts[0].dtype
    return jnp.concatenate([p.astype(dtype) for p in kept], dim)


implements("clone", "detach", "alias", "lift_fresh_copy", "lift_fresh")(lambda x: x)


@implements("_to_copy")
def _to_copy(x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return x if dtype is None else convert(x, jax_dtype(dtype))


@implements("copy")
def _copy(old: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.broadcast_to(convert(new, old.dtype), old.shape)


def convert(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Another dtype; small integers of a number keep its last bits, as on PyTorch's CPU."""
    is_float = jnp.issubdtype(x.dtype, jnp.floating)  # NumPy does not know bfloat16 for one
    if is_float and dtype.kind in "iu" and dtype.itemsize < 4:
        return x.astype(np.int64).astype(dtype)
    if x.dtype.kind == "c" and dtype.kind not in "cb":
        x = x.real
    return x.astype(dtype)


@implements("constant_pad_nd")
def _pad(x: jax.Array, padding: Sequence[int], value: Any = 0) -> jax.Array:
    pairs = [(padding[2 * i], padding[2 * i + 1], 0) for i in range(len(padding) // 2)]
    config = [(0, 0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    return lax.pad(x, cast(value, x.dtype), config)


@implements("flip")
def _flip(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return jnp.flip(x, tuple(dims)) if x.ndim and len(dims) else x


@implements("diagonal_scatter")
def _diagonal_scatter(
    x: jax.Array, source: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    count = source.shape[-1]
    rows = jnp.arange(count) + max(-offset, 0)
    columns = jnp.arange(count) + max(offset, 0)
    moved = moved.at[..., rows, columns].set(source.astype(x.dtype))
    return jnp.moveaxis(moved, (-2, -1), (dim1, dim2))


@implements("unfold")
def _unfold(x: jax.Array, dim: int, size: int, step: int) -> jax.Array:
    if not x.ndim:
        return x.reshape(1)[:size]
    dim %= x.ndim
    starts = np.arange((x.shape[dim] - size) // step + 1) * step
    windows = jnp.take(x, starts[:, None] + np.arange(size), dim)
    return jnp.moveaxis(windows, dim + 1, -1)
