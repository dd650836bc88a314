"""Norms over parts of one sample: a layer, a group of channels, a channel.

torch_xla 2.9 takes layer norm for a batch norm of one batch, of which a stage would save three
values of the input's size for the backward: the input, the normalized input, and the result for the
product after it. With mean and reciprocal deviation kept, one byte in a hundred, all three follow
from the input, elementwise. Group norm and instance norm are the same over other dimensions;
torch_xla takes the variance as a difference of two large sums, which loses digits.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.graph_capture_wrappers import (
    set_partitioner_tag_must_be_in_backward,
)
from torch.fx.traceback import has_preserved_node_meta

from mpxla.graph.typed import Function

__all__ = ["group_norm", "instance_norm", "layer_norm"]


def layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """`aten.layer_norm`; narrow floats are normalized in float32, as torch does."""
    return _LayerNorm.apply(x, weight, bias, len(normalized_shape), eps)


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """`aten.group_norm` of [N, C, ...], in the precision of `layer_norm`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    groups = wide.reshape(x.shape[0], num_groups, -1)
    result = _LayerNorm.apply(groups, None, None, 1, eps).reshape(x.shape)
    channels = [-1] + [1] * (x.dim() - 2)
    if weight is not None:
        result = result * weight.reshape(channels)
    if bias is not None:
        result = result + bias.reshape(channels)
    return result.to(x.dtype)


def instance_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *rest: Any,
) -> torch.Tensor:
    """`aten.instance_norm` of [N, C, ...]; with running statistics, torch's own."""
    if use_input_stats and running_mean is None:
        return group_norm(x, x.shape[1], weight, bias, eps)
    statistics = (running_mean, running_var, use_input_stats, momentum, eps)
    return torch.ops.aten.instance_norm.default(x, weight, bias, *statistics, *rest)


class _LayerNorm(Function):
    """y = (x - mean) * rstd * weight + bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        num_dims: int,
        eps: float,
    ) -> torch.Tensor:
        dims = tuple(range(-num_dims, 0))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.mean(dims, keepdim=True)
        centred = wide - mean
        rstd = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.num_dims = num_dims
        ctx.bias_dtype = None if bias is None else bias.dtype
        result = centred * rstd
        if weight is not None:
            result = result * weight
        if bias is not None:
            result = result + bias
        return result.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dims = tuple(range(-ctx.num_dims, 0))
        rows = tuple(range(x.dim() - ctx.num_dims))
        wide = grad.to(mean.dtype)
        with _in_backward():
            # With turned signs, or it would be taken for the forward's own value and be kept.
            normal = (mean - x.to(mean.dtype)) * -rstd
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_normal = wide if weight is None else wide * weight
            along = (d_normal * normal).mean(dims, keepdim=True)
            d_x = ((d_normal - d_normal.mean(dims, keepdim=True) - normal * along) * rstd).to(
                x.dtype
            )
        if ctx.needs_input_grad[1]:
            assert weight is not None
            d_weight = _sum(wide * normal, rows).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            d_bias = _sum(wide, rows).to(ctx.bias_dtype)
        return d_x, d_weight, d_bias, None, None


def _in_backward() -> contextlib.AbstractContextManager[Any]:
    """Keeps the partitioner from computing in the forward, and saving, what needs only `x`.

    Saved values would be of the same size as `x`, which exists anyway.
    """
    if has_preserved_node_meta():
        return set_partitioner_tag_must_be_in_backward()
    return contextlib.nullcontext()


def _sum(values: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Sum over dimensions; over none of them, the values."""
    return values.sum(dims) if dims else values
