"""Pooling that torch_xla 2.9 lacks: maxima with their places, windows with gaps, uneven parts.

A window is a row of positions for each dimension. Maxima are found without a derivative, as places;
values are then gathered, so that gradients go where torch sends them: to the first of equal maxima.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._meta_registrations import pooling_output_shape

__all__ = ["POOLINGS"]

_aten = torch.ops.aten
_Windows = tuple[torch.Tensor, torch.Tensor]
"""Positions [O, K] of every output along one dimension, and which of them count."""


def _wide(values: int | Sequence[int], count: int) -> list[int]:
    listed = [values] if isinstance(values, int) else list(values)
    return listed * count if len(listed) == 1 else listed


def _strided_windows(
    size: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    ceil_mode: bool,
    device: torch.device,
) -> _Windows:
    count = pooling_output_shape(size, kernel, padding, stride, dilation, ceil_mode)
    starts = torch.arange(count, device=device)[:, None] * stride - padding
    positions = starts + torch.arange(kernel, device=device) * dilation
    return positions, (positions >= 0) & (positions < size)


def _uneven_windows(size: int, count: int, device: torch.device) -> _Windows:
    """Adaptive pooling: from floor(i * size / count) up to ceil((i + 1) * size / count)."""
    outputs = torch.arange(count, device=device)[:, None]
    starts = outputs * size // count
    ends = ((outputs + 1) * size + count - 1) // count
    longest = max(-(-(i + 1) * size // count) - i * size // count for i in range(count))
    positions = starts + torch.arange(longest, device=device)
    return positions, positions < ends


def _largest(x: torch.Tensor, windows: Sequence[_Windows]) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima of windows over the last dimensions, and their places in those dimensions."""
    num_dims = len(windows)
    sizes = x.shape[-num_dims:]
    place = torch.zeros((1,) * (2 * num_dims), dtype=torch.int64, device=x.device)
    counts = torch.ones((1,) * (2 * num_dims), dtype=torch.bool, device=x.device)
    for dim, (positions, is_inside) in enumerate(windows):
        shape = [1] * (2 * num_dims)
        shape[dim], shape[num_dims + dim] = positions.shape
        place = place * sizes[dim] + positions.clamp(0, sizes[dim] - 1).reshape(shape)
        counts = counts & is_inside.reshape(shape)
    place = place.flatten(num_dims).flatten(0, num_dims - 1)  # [outputs, window]
    counts = counts.flatten(num_dims).flatten(0, num_dims - 1)
    flat = x.flatten(-num_dims)
    seen = flat.detach().index_select(-1, place.flatten()).unflatten(-1, place.shape)
    first = torch.where(counts, seen, -torch.inf).argmax(-1, keepdim=True)
    indices = place.expand(seen.shape).gather(-1, first).squeeze(-1)
    shape = [*x.shape[:-num_dims], *(positions.shape[0] for positions, _ in windows)]
    return flat.gather(-1, indices).reshape(shape), indices.reshape(shape)


def _max_pool_with_indices(
    num_dims: int,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    settings = (kernel_size, stride or kernel_size, padding, dilation)
    kernels, steps, margins, gaps = (_wide(s, num_dims) for s in settings)
    rows = zip(x.shape[-num_dims:], kernels, steps, margins, gaps, strict=True)
    return _largest(x, [_strided_windows(*row, ceil_mode, x.device) for row in rows])


def _max_pool(num_dims: int, x: torch.Tensor, *settings: Any, **named: Any) -> torch.Tensor:
    """Without indices: torch_xla's own, except for what it lacks."""
    dilation = settings[3] if len(settings) > 3 else named.get("dilation", 1)
    if num_dims < 3 and set(_wide(dilation, num_dims)) == {1}:
        return _own("max_pool{}d", num_dims)(x, *settings, **named)
    return _max_pool_with_indices(num_dims, x, *settings, **named)[0]


def _adaptive_max_pool(
    num_dims: int, x: torch.Tensor, output_size: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = zip(x.shape[-num_dims:], _wide(output_size, num_dims), strict=True)
    return _largest(x, [_uneven_windows(*pair, x.device) for pair in sizes])


def _adaptive_avg_pool(num_dims: int, x: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
    """Means of uneven parts, as a product with their shares for each dimension."""
    counts = _wide(output_size, num_dims)
    sizes = x.shape[-num_dims:]
    if all(count == 1 for count in counts):
        # Traced with `as_strided_` otherwise, where strides look like channels last.
        return x.mean(dim=list(range(-num_dims, 0)), keepdim=True)
    if all(size % count == 0 for size, count in zip(sizes, counts, strict=True)):
        if num_dims > 1:
            return _own("adaptive_avg_pool{}d", num_dims)(x, output_size)
        return x.unflatten(-1, (counts[0], sizes[0] // counts[0])).mean(-1)
    for dim, (size, count) in enumerate(zip(sizes, counts, strict=True), start=-num_dims):
        outputs = torch.arange(count, device=x.device)[:, None]
        place = torch.arange(size, device=x.device)
        is_in = (place >= outputs * size // count) & (
            place < ((outputs + 1) * size + count - 1) // count
        )
        shares = is_in.to(x.dtype) / is_in.sum(1, keepdim=True)
        x = (x.movedim(dim, -1) @ shares.mT).movedim(-1, dim)
    return x


def _avg_pool(
    num_dims: int,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """What the device's derivative lacks, as sums by a product for each dimension."""
    if not (ceil_mode and count_include_pad) and divisor_override is None:
        settings = (kernel_size, stride, padding, ceil_mode, count_include_pad)
        return _own("avg_pool{}d", num_dims)(x, *settings)
    settings = (kernel_size, stride or kernel_size, padding)
    kernels, steps, gaps = (_wide(s, num_dims) for s in settings)
    rows = zip(x.shape[-num_dims:], kernels, steps, gaps, strict=True)
    for dim, (size, kernel, step, gap) in enumerate(rows, start=-num_dims):
        window = (size, kernel, step, gap, 1, ceil_mode, x.device)
        positions, is_inside = _strided_windows(*window)
        places = torch.arange(size, device=x.device)
        shares = (positions[:, :, None] == places).any(1).to(x.dtype)
        if divisor_override is None:
            counts = positions < size + gap if count_include_pad else is_inside
            shares = shares / counts.sum(1, keepdim=True)
        x = (x.movedim(dim, -1) @ shares.mT).movedim(-1, dim)
    return x if divisor_override is None else x / divisor_override


def _max_unpool(
    num_dims: int, x: torch.Tensor, indices: torch.Tensor, output_size: Sequence[int], *_: Any
) -> torch.Tensor:
    empty = x.new_zeros([*x.shape[:-num_dims], math.prod(output_size)])
    filled = empty.scatter(-1, indices.flatten(-num_dims), x.flatten(-num_dims))
    return filled.unflatten(-1, list(output_size))


def _own(name: str, num_dims: int) -> Any:
    """PyTorch's operator for so many dimensions."""
    return getattr(_aten, name.format(num_dims)).default


def _of(num_dims: int, function: Callable[..., Any]) -> Callable[..., Any]:
    def pool(*arguments: Any, **named: Any) -> Any:
        return function(num_dims, *arguments, **named)

    return pool


_FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "max_pool{}d_with_indices": (_max_pool_with_indices, (1, 2, 3)),
    "max_pool{}d": (_max_pool, (1, 2, 3)),
    "adaptive_max_pool{}d": (_adaptive_max_pool, (1, 2, 3)),
    "adaptive_avg_pool{}d": (_adaptive_avg_pool, (1, 2, 3)),
    "avg_pool{}d": (_avg_pool, (2, 3)),
    "max_unpool{}d": (_max_unpool, (2, 3)),
}
POOLINGS: dict[Any, Callable[..., Any]] = {
    _own(name, n): _of(n, function)
    for name, (function, counts) in _FUNCTIONS.items()
    for n in counts
}
"""Replaced before differentiation."""
