"""Functions of torch with settings that were read of tensors, `F.leaky_relu(x, slope.item())`.

Torch's own want Python's numbers there, which nobody knows while a step is captured. These compute
the same, derivatives too, by operators that take tensors in the place of numbers. What torch checks
of a number's value is left out.
This module must not know how a step is captured.
"""

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mpxla.graph.python.number import is_number

__all__ = ["FUNCTIONS_OF_NUMBERS"]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the precision that torch computes elements of 16 bits in."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _placed(input: torch.Tensor, result: torch.Tensor, inplace: bool) -> torch.Tensor:
    result = result.to(input.dtype)
    return input.copy_(result) if inplace else result


def _leaky_relu(
    input: torch.Tensor, negative_slope: Any = 0.01, inplace: bool = False
) -> torch.Tensor:
    return _placed(input, torch.where(input > 0, input, input * negative_slope), inplace)


def _elu(
    input: torch.Tensor, alpha: Any = 1.0, inplace: bool = False, *, scale: Any = 1
) -> torch.Tensor:
    x = _wide(input)
    below = alpha * torch.expm1(x.clamp(max=0) / scale)  # of large numbers it would be infinite
    return _placed(input, torch.where(x > 0, x, below), inplace)


def _celu(input: torch.Tensor, alpha: Any = 1.0, inplace: bool = False) -> torch.Tensor:
    return _elu(input, alpha, inplace, scale=alpha)


def _softplus(input: torch.Tensor, beta: Any = 1, threshold: Any = 20) -> torch.Tensor:
    x = _wide(input)
    scaled = x * beta
    smooth = torch.log1p(torch.exp(scaled.clamp(max=threshold))) / beta
    return torch.where(scaled > threshold, x, smooth).to(input.dtype)


def _threshold(
    input: torch.Tensor, threshold: Any, value: Any, inplace: bool = False
) -> torch.Tensor:
    return _placed(input, torch.where(input <= threshold, value, input), inplace)


def _hardtanh(
    input: torch.Tensor, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False
) -> torch.Tensor:
    # At the bounds themselves there is no gradient, other than that of `clamp`.
    below = torch.where(input <= min_val, min_val, input)
    return _placed(input, torch.where(input >= max_val, max_val, below), inplace)


def _hardshrink(input: torch.Tensor, lambd: Any = 0.5) -> torch.Tensor:
    return torch.where((input >= -lambd) & (input <= lambd), 0.0, input)


def _softshrink(input: torch.Tensor, lambd: Any = 0.5) -> torch.Tensor:
    above = torch.where(input > lambd, input - lambd, input * 0.0)
    return torch.where(input < -lambd, input + lambd, above)


def _nan_to_num(
    input: torch.Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> torch.Tensor:
    if not input.is_floating_point():
        return input.clone()
    limits = torch.finfo(input.dtype)
    found = torch.where(input == math.inf, limits.max if posinf is None else posinf, input)
    found = torch.where(input == -math.inf, limits.min if neginf is None else neginf, found)
    return torch.where(input.isnan(), 0.0 if nan is None else nan, found)


def _layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: Any = 1e-5,
) -> torch.Tensor:
    kind = F.layer_norm(input, normalized_shape, weight, bias).dtype
    x = _wide(input)
    variance = x.var([-1 - d for d in range(len(normalized_shape))], correction=0, keepdim=True)
    other = 1e-5
    found = F.layer_norm(x, normalized_shape, eps=other)
    found = found * ((variance + other) / (variance + eps)).sqrt()
    found = found if weight is None else found * weight
    return (found if bias is None else found + bias).to(kind)


def _dropout(
    input: torch.Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training:
        return input
    kept = 1 - p
    noise = torch.bernoulli(torch.full_like(input, kept, dtype=torch.float32)).to(input.dtype)
    return _placed(input, input * (noise / (kept + (kept == 0))), inplace)


def _linspace(
    start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None, device: Any = None
) -> torch.Tensor:
    kind = dtype or torch.get_default_dtype()
    first, last = torch.as_tensor(start).to(kind), torch.as_tensor(end).to(kind)
    step = (last - first) / max(steps - 1, 1)
    places = torch.arange(steps, device=device)
    # From both ends, as torch computes them.
    forth, back = first + step * places, last - step * (steps - 1 - places)
    return torch.where(places < max(steps // 2, int(steps == 1)), forth, back)


def _huber_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    reduction: str = "mean",
    delta: Any = 1.0,
    **rest: Any,
) -> torch.Tensor:
    losses = F.huber_loss(input / delta, target / delta, reduction, **rest)
    return losses * delta * delta


def _reduced(original: Any, losses: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss function of torch, by what it is before it is reduced."""
    signature = inspect.signature(original)

    def loss(*args: Any, **named: Any) -> torch.Tensor:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        given = bound.arguments
        average, reduce, reduction = map(given.pop, ("size_average", "reduce", "reduction"))
        if average is not None or reduce is not None:
            reduction = F._Reduction.legacy_get_string(average, reduce)  # pyright: ignore
        found = losses(**given)
        return found if reduction == "none" else getattr(found, reduction)()

    return loss


def _smooth_l1_losses(input: torch.Tensor, target: torch.Tensor, beta: Any) -> torch.Tensor:
    found = (input - target).abs()
    return torch.where(found < beta, found * found / (2 * (beta + (beta == 0))), found - beta / 2)


def _group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: Any = 1e-5,
) -> torch.Tensor:
    kind = F.group_norm(input, num_groups, weight, bias).dtype
    groups = _wide(input).reshape(len(input), num_groups, -1)
    found = _layer_norm(groups, groups.shape[2:], eps=eps).reshape(input.shape)
    shape = (1, -1, *(1 for _ in input.shape[2:]))
    found = found if weight is None else found * weight.reshape(shape)
    return (found if bias is None else found + bias.reshape(shape)).to(kind)


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: Any = None,
) -> torch.Tensor:
    x = _wide(input)
    mean = x.square().mean([-1 - d for d in range(len(normalized_shape))], keepdim=True)
    found = x / (mean + eps).sqrt()
    return (found if weight is None else found * weight).to(input.dtype)


def _cross_entropy(
    input: torch.Tensor, target: torch.Tensor, *args: Any, label_smoothing: Any = 0.0, **named: Any
) -> torch.Tensor:
    own = F.cross_entropy(input, target, *args, **named)
    smooth = F.cross_entropy(input, target, *args, **named, label_smoothing=1.0)
    return own * (1 - label_smoothing) + smooth * label_smoothing


def _margin_ranking_losses(
    input1: torch.Tensor, input2: torch.Tensor, target: torch.Tensor, margin: Any
) -> torch.Tensor:
    return (margin - target * (input1 - input2)).clamp_min(0)


def _hinge_embedding_losses(input: torch.Tensor, target: torch.Tensor, margin: Any) -> torch.Tensor:
    far = torch.where(target == 1, 0.0, (margin - input).clamp_min(0))
    return far + torch.where(target == -1, 0.0, input)


def _cosine_embedding_losses(
    input1: torch.Tensor, input2: torch.Tensor, target: torch.Tensor, margin: Any
) -> torch.Tensor:
    squares = [x.square().sum(-1) + 1e-12 for x in (input1, input2)]
    cosine = (input1 * input2).sum(-1) / (squares[0] * squares[1]).sqrt()
    far = torch.where(target == -1, (cosine - margin).clamp_min(0), 0.0)
    return far + torch.where(target == 1, 1 - cosine, 0.0)


def _triplet_margin_losses(
    anchor: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    margin: Any,
    p: float,
    eps: float,
    swap: bool,
) -> torch.Tensor:
    near, far = (F.pairwise_distance(anchor, other, p, eps) for other in (positive, negative))
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return (margin + near - far).clamp_min(0)


def _multi_margin_losses(
    input: torch.Tensor, target: torch.Tensor, p: int, margin: Any, weight: torch.Tensor | None
) -> torch.Tensor:
    own = input.gather(-1, target.unsqueeze(-1))
    losses = (margin - own + input).clamp_min(0) ** p
    losses = losses if weight is None else losses * weight[target].unsqueeze(-1)
    is_own = torch.arange(input.shape[-1]) == target.unsqueeze(-1)
    return losses.masked_fill(is_own, 0).mean(-1)


def _pad(
    input: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> torch.Tensor:
    pad = [operator.index(width) for width in pad]  # shapes are Python's
    if not is_number(value):
        return F.pad(input, pad, mode, value)
    is_own = F.pad(torch.ones_like(input, dtype=torch.bool), pad)
    return torch.where(is_own, F.pad(input, pad, mode), value)


def _add_product(
    input: torch.Tensor, one: torch.Tensor, other: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    return input * beta + (one @ other) * alpha


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **named: Any
) -> torch.Tensor:
    scale = named.pop("scale", None)
    if scale is None:  # another setting is a number
        return F.scaled_dot_product_attention(query, key, value, *args, **named)
    return F.scaled_dot_product_attention(query * scale, key, value, *args, scale=1.0, **named)


FUNCTIONS_OF_NUMBERS: dict[Any, Callable[..., torch.Tensor]] = {
    F.leaky_relu: _leaky_relu,
    F.elu: _elu,
    F.celu: _celu,
    torch.celu: _celu,
    F.softplus: _softplus,
    F.threshold: _threshold,
    F.hardtanh: _hardtanh,
    F.hardshrink: _hardshrink,
    F.softshrink: _softshrink,
    torch.nan_to_num: _nan_to_num,
    torch.Tensor.nan_to_num: _nan_to_num,
    F.layer_norm: _layer_norm,
    F.dropout: _dropout,
    torch.linspace: _linspace,
    F.huber_loss: _huber_loss,
    F.pad: _pad,
    torch.addmm: _add_product,
    torch.Tensor.addmm: _add_product,
    torch.addmv: _add_product,
    torch.baddbmm: _add_product,
    F.group_norm: _group_norm,
    F.rms_norm: _rms_norm,
    F.cross_entropy: _cross_entropy,
    F.scaled_dot_product_attention: _attention,
    **{
        original: _reduced(original, losses)
        for original, losses in (
            (F.smooth_l1_loss, _smooth_l1_losses),
            (F.margin_ranking_loss, _margin_ranking_losses),
            (F.hinge_embedding_loss, _hinge_embedding_losses),
            (F.cosine_embedding_loss, _cosine_embedding_losses),
            (F.triplet_margin_loss, _triplet_margin_losses),
            (F.multi_margin_loss, _multi_margin_losses),
        )
    },
}
"""What is called in the place of a function with numbers whose values are not known."""
