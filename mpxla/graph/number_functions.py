"""Functions of torch with settings that were read of tensors, `F.leaky_relu(x, slope.item())`.

Torch's own want Python's numbers there, which nobody knows while a step is captured. These compute
the same, derivatives too, by operators that take tensors in the place of numbers. What torch checks
of a number's value is left out.
This module must not know how a step is captured.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

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


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **named: Any
) -> torch.Tensor:
    scale = named.pop("scale")
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
    F.scaled_dot_product_attention: _attention,
}
"""What is called in the place of a function with numbers whose values are not known."""
