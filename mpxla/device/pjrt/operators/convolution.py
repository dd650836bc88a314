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
    of_x, of_weight = jax.vjp(lambda x, w: _convolve(x, w, *settings), x, weight)[1](gradient)
    return of_x, of_weight, jnp.sum(gradient, (0, *range(2, gradient.ndim)))
