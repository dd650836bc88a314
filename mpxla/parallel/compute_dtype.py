"""`bf16: True` and `fp16: True`: the model in 16 bits, between inputs and outputs in float32.

    inputs, float32 -> 16 bits -> model -> outputs in 16 bits -> float32 -> the user's loss

As the wrappers of SMP and Megatron do it. Batch norms stay in float32: their running statistics
move by less than half an ulp of 16 bits.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from mpxla.config import Config
from mpxla.delayed import convert_delayed
from mpxla.errors import ConfigError
from mpxla.graph.typed import Function

__all__ = ["compute_dtype", "convert", "in_dtype", "narrowed", "widened", "with_scaled_gradients"]


def compute_dtype(config: Config) -> torch.dtype | None:
    """The type that models are converted to; None leaves them as they are."""
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 or config.fp16_params else None


def convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Converts parameters and buffers in place to bfloat16 or float16; they stay the same objects.

    It may have no values yet, which are converted when they are made.

    Raises:
        ConfigError: parameters or buffers have no such type (complex numbers), which names their
            module.
    """
    problems = [
        f"{path or 'the model'} ({type(part).__name__}) has the complex {name}"
        for path, part in module.named_modules()
        for name, tensor in (
            *part.named_parameters(recurse=False),
            *part.named_buffers(recurse=False),
        )
        if tensor.is_complex()
    ]
    if problems:
        key = "bf16" if dtype is torch.bfloat16 else "fp16"
        raise ConfigError(
            f"the model cannot be converted to {str(dtype).removeprefix('torch.')}, in which there "
            f"are no complex numbers: {'; '.join(problems)}. Remove the key {key} and use "
            f"torch.autocast around the other modules."
        )
    for part in module.modules():
        if not isinstance(part, _BatchNorm):
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                if tensor.is_floating_point() and tensor.dtype is not dtype:
                    data = tensor.data
                    tensor.data = convert_delayed(data, dtype) if data.is_meta else data.to(dtype)


def in_dtype(
    module: nn.Module, state: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A module's state dict as `convert` would leave it; float32 widens what was 16 bits.

    Values that are no tensors stay.
    """
    kept = tuple(
        f"{path}." if path else ""
        for path, part in module.named_modules()
        if isinstance(part, _BatchNorm) and dtype is not torch.float32
    )
    return {
        name: value.to(dtype)
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and not (kept and name.startswith(kept))
        else value
        for name, value in state.items()
    }


def narrowed(values: Any, dtype: torch.dtype) -> Any:
    """Floating tensors among the arguments of the model, in its type."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values
    )


def widened(values: Any, dtype: torch.dtype) -> Any:
    """What the model returns, with the tensors of its type in float32."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.float() if t.dtype is dtype else t, values
    )


class _ScaledGradient(Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def with_scaled_gradients(values: Any, factor: float) -> Any:
    """The same values; gradients that flow back through them are multiplied by the factor.

    With the loss scale behind the model and its inverse before it, any plain `loss.backward()`
    leaves scaled gradients on the parameters, and true ones on the inputs.
    """
    if factor == 1.0:
        return values
    return pytree.tree_map_only(
        torch.Tensor, lambda t: _ScaledGradient.apply(t, factor) if t.requires_grad else t, values
    )
