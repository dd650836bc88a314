"""Torch's own `GradScaler`, made to see overflows of all ranks.

Scripts scale by `torch.amp.GradScaler`. In a captured step its scale would be the number of the
first call, and it would look for inf and nan on this rank only. From the first `DistributedModel`
on, its scale is a host tensor that captured steps read anew in every call, and gradients of a
`DistributedOptimizer` are divided by that optimizer, which asks all ranks. All else is torch's.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from mpxla.graph.capture import current_recorder
from mpxla.parallel.grad_scaler import refuse_inside, refuse_unused, refuse_with_keys, scaled

__all__ = ["see_all_overflows"]

_CPU = torch.device("cpu")
_NOT_INSIDE = ("unscale_", "update", "get_scale")
_scale, _unscale = GradScaler.scale, GradScaler._unscale_grads_  # pyright: ignore[reportPrivateUsage]


def see_all_overflows() -> None:
    """Exchanges methods of `torch.amp.GradScaler` (torch 2.9); once in a process."""
    kind: Any = GradScaler
    if kind.scale is _scale:
        kind.scale, kind._unscale_grads_ = _scale_anywhere, _unscale_everywhere
        kind.__init__ = _with_scale(kind.__init__)
        for name in _NOT_INSIDE:
            setattr(kind, name, _outside(name, getattr(kind, name)))


def _with_scale(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Torch makes the scale when it is used first: the second step would be captured again.
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(_CPU)

    return make


def _outside(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            refuse_inside(name)
        return original(self, *args, **kwargs)

    return call


def _scale_anywhere(self: Any, outputs: Any) -> Any:
    if not self.is_enabled():
        return outputs
    self.has_scaled = True
    if current_recorder() is None:
        return _scale(self, outputs)
    refuse_with_keys()
    held: dict[str, Any] = vars(self)
    with _disable_current_modes(), DisableTorchFunction():
        if held["_scale"] is None:
            self._lazy_init_scale_growth_tracker(_CPU)
        # Captured steps read tensors of the host anew, and torch changes these in place.
        for name in ("_scale", "_growth_tracker"):
            held[name] = held[name].to(_CPU)
    return scaled(outputs, held["_scale"])


def _unscale_everywhere(
    self: Any, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor]:
    unscale = getattr(optimizer, "unscale_gradients", None)
    if unscale is None:
        return _unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
    refuse_unused(self)
    return {found_inf.device: found_inf.fill_(float(unscale(float(self._scale))))}
