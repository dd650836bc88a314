"""Plain attributes that hooks of PyTorch compute of parameters: `layer.weight` of a pruned layer.

`torch.nn.utils.prune`, and `weight_norm` and `spectral_norm` beside it, set such an attribute
before every forward. A captured step runs no hooks, and scripts read the attribute: to log how many
weights are zero, or to prune once more. So it is set after every step, from the values that the
step has read.
This module must not know how steps run.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from mpxla.runtime.model_watch import ModelView

__all__ = ["set_derived"]


def set_derived(view: ModelView) -> None:
    """Sets the attributes that a step with a model would have set."""
    for index, kind, _ in view.hooks:
        if kind == "_forward_pre_hooks" and index >= 0:
            module: Any = view.modules[index]
            for hook in module._forward_pre_hooks.values():
                _set(module, hook)


def _set(module: nn.Module, hook: Any) -> None:
    with torch.no_grad():
        if isinstance(hook, BasePruningMethod):
            name: str = hook._tensor_name  # pyright: ignore[reportPrivateUsage]
            setattr(module, name, hook.apply_mask(module))
        elif isinstance(hook, (WeightNorm, SpectralNorm)):
            setattr(module, hook.name, _normed(module, hook))


def _normed(module: nn.Module, hook: WeightNorm | SpectralNorm) -> torch.Tensor:
    is_weight = isinstance(hook, WeightNorm)
    source: torch.Tensor = getattr(module, f"{hook.name}_{'v' if is_weight else 'orig'}")
    vectors = (getattr(module, f"{hook.name}_{name}", source) for name in "uv")
    if any(tensor.is_meta for tensor in (source, *vectors)):  # some of it is on another rank
        return torch.empty_like(source.detach(), device="meta")
    if isinstance(hook, WeightNorm):
        return hook.compute_weight(module)
    return hook.compute_weight(module, do_power_iteration=False)  # the step has left the vectors
