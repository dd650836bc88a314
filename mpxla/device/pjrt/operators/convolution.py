"""Convolutions, transposed ones too, in one to three dimensions, and their derivatives."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from mpxla.device.pjrt.operators.pooling import spread
from mpxla.device.pjrt.table import implements

Sizes = Sequence[int]


def _swap_channels(weight: jax.Array, groups: int) -> jax.Array:
    """[I, O / groups, ...] of a transposed convolution as [O, I / groups, ...]."""
    inputs, outputs, *window = weight.shape
    split = weight.reshape(groups, inputs // groups, outputs, *window)
    return jnp.swapaxes(split, 1, 2).reshape(groups * outputs, inputs // groups, *window)


def _convolve(
    x: jax.Array,
    weight: jax.Array,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> jax.Array:
    """[B, I, ...] by [O, I / groups, ...] -> [B, O, ...]."""
    count = weight.ndim - 2
    stride, padding, dilation = (spread(v, count) for v in (stride, padding, dilation))
    margins = [(p, p) for p in padding]
    steps = [1] * count
    if transposed:
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        ends = zip(reach, padding, spread(output_padding, count), strict=True)
        margins = [(r - p, r - p + e) for r, p, e in ends]
        weight = jnp.flip(_swap_channels(weight, groups), tuple(range(2, weight.ndim)))
        stride, steps = steps, stride
    space = "DHW"[3 - count :]
    return lax.conv_general_dilated(
        x,
        weight,
        stride,
        margins,
        lhs_dilation=steps,
        rhs_dilation=dilation,
        dimension_numbers=(f"NC{space}", f"OI{space}", f"NC{space}"),
        feature_group_count=groups,
    )


@implements("convolution")
def _convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> jax.Array:
    is_single = x.ndim < weight.ndim
    x = x[None] if is_single else x
    result = _convolve(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    if bias is not None:
        result = result + bias.reshape(1, -1, *[1] * (weight.ndim - 2))
    return result[0] if is_single else result


@implements("convolution_backward")
def _convolution_backward(
    gradient: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    of_x = of_weight = of_bias = None
    if output_mask[0]:
        (of_x,) = jax.vjp(lambda v: _convolve(v, weight, *settings), x)[1](gradient)
    if output_mask[1]:
        (of_weight,) = jax.vjp(lambda v: _convolve(x, v, *settings), weight)[1](gradient)
    if output_mask[2]:
        of_bias = jnp.sum(gradient, (0, *range(2, gradient.ndim)))
    return of_x, of_weight, of_bias


def _window_places(size: int, window: int, dilation: int, padding: int, stride: int) -> jax.Array:
    """Where the windows of one dimension lie in the padded input: [window, count]."""
    count = (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1
    return jnp.arange(window)[:, None] * dilation + jnp.arange(count) * stride


@implements("im2col")
def _im2col(
    x: jax.Array, kernel_size: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes
) -> jax.Array:
    """Windows of [B, C, H, W] as columns: [B, C windows, places]."""
    batched = x if x.ndim == 4 else x[None]
    rows, columns = (
        _window_places(batched.shape[2 + i], kernel_size[i], dilation[i], padding[i], stride[i])
        for i in range(2)
    )
    padded = jnp.pad(batched, [(0, 0), (0, 0), *((p, p) for p in padding)])
    found = padded[:, :, rows[:, None, :, None], columns[None, :, None, :]]  # [B, C, k, l, i, j]
    batch, channels, k, m, i, j = found.shape
    result = found.reshape(batch, channels * k * m, i * j)
    return result if x.ndim == 4 else result[0]


@implements("col2im")
def _col2im(
    x: jax.Array,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes,
    padding: Sizes,
    stride: Sizes,
) -> jax.Array:
    """The transpose of `im2col`."""
    batched = x if x.ndim == 3 else x[None]
    channels = batched.shape[1] // (kernel_size[0] * kernel_size[1])
    shape = (batched.shape[0], channels, *output_size)
    image = jnp.zeros(shape, x.dtype)
    _, pull = jax.vjp(lambda v: _im2col(v, kernel_size, dilation, padding, stride), image)
    (result,) = pull(batched)
    return result if x.ndim == 3 else result[0]
