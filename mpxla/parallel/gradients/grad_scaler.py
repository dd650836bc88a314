"""Loss scaling under autocast: torch's `GradScaler`, made to see overflows of all ranks.

    with torch.autocast("xla", dtype=torch.float16): loss = ...
    model.backward(scaler.scale(loss))       in the step function
    scaler.step(optimizer); scaler.update()  after it

In a captured step the scale of torch's would be the number of the first call, and it would look for
inf and nan on this rank only. Here it is a host tensor that captured steps read anew in every call,
so that a changed one compiles nothing, and gradients of a `DistributedOptimizer` are divided by
that optimizer, which asks all ranks. `smp.amp.GradScaler` does so always, and explains itself;
`torch.amp.GradScaler` from the first `DistributedModel` on. All else is torch's.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.amp.grad_scaler import GradScaler as TorchScaler
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from mpxla.errors import MpxlaError, StepError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.user_code import at_user_line
from mpxla.parallel.gradients.loss_scale import overflow_text
from mpxla.session import current, is_initialized

__all__ = ["GradScaler", "see_all_overflows"]

_CPU = torch.device("cpu")
_SMALLEST = 2.0**-40
"""Below it the scale only loses digits: torch's scaler would go on halving for ever."""
_SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
_NOT_INSIDE = ("unscale_", "update", "get_scale")
_scale, _unscale = TorchScaler.scale, TorchScaler._unscale_grads_  # pyright: ignore[reportPrivateUsage]


def see_all_overflows() -> None:
    """Exchanges methods of `torch.amp.GradScaler` (torch 2.9); once in a process."""
    kind: Any = TorchScaler
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
            _refuse_inside(name)
        return original(self, *args, **kwargs)

    return call


def _scale_anywhere(self: Any, outputs: Any) -> Any:
    if not self.is_enabled():
        return outputs
    self.has_scaled = True
    if current_recorder() is None:
        return _scale(self, outputs)
    _refuse_with_keys()
    held: dict[str, Any] = vars(self)
    with _disable_current_modes(), DisableTorchFunction():
        if held["_scale"] is None:
            self._lazy_init_scale_growth_tracker(_CPU)
        # Captured steps read tensors of the host anew, and torch changes these in place.
        for name in ("_scale", "_growth_tracker"):
            held[name] = held[name].to(_CPU)
    return _scaled(outputs, held["_scale"])


def _unscale_everywhere(
    self: Any, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor]:
    unscale = getattr(optimizer, "unscale_gradients", None)
    if unscale is None:
        return _unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
    if not getattr(self, "has_scaled", False):
        raise StepError(
            "GradScaler.unscale_ or step was called, but this scaler has scaled no loss: the "
            "step function was captured with another one, or calls model.backward(loss). Make "
            "one scaler before the first step, and call model.backward(scaler.scale(loss))."
        )
    return {found_inf.device: found_inf.fill_(float(unscale(float(self._scale))))}


class GradScaler(TorchScaler):
    """Scales losses, and skips updates whose gradients have overflowed on any rank.

    All ranks must call `unscale_` and `step`, with a `DistributedOptimizer`.

    Args:
        *args: torch's: perhaps the kind of device, then `init_scale`, `growth_factor`,
            `backoff_factor`, `growth_interval`, `enabled`.
        **kwargs: the same by keyword.

    Raises:
        TypeError: an argument is unknown.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        if args and isinstance(args[0], str):
            args = args[1:]
        kwargs.pop("device", None)
        given = dict(zip(_SETTINGS, args, strict=False)) | kwargs
        unknown = sorted(set(given) - set(_SETTINGS))
        if unknown or len(args) > len(_SETTINGS):
            raise TypeError(f"GradScaler takes {', '.join(_SETTINGS)}; got {unknown or args}")
        see_all_overflows()  # the methods that are not here are torch's, exchanged
        super().__init__("cpu", **given)
        self._step = 0
        self._last_finite: int | None = None

    def scale(self, outputs: Any) -> Any:
        """A loss, or several in a container, times the scale.

        Raises:
            MpxlaError: a key of the configuration does it, or makes it needless.
        """
        if self._enabled:
            _refuse_with_keys()
        return _scale_anywhere(self, outputs)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not hasattr(optimizer, "unscale_gradients"):
            raise MpxlaError(
                f"GradScaler was given a {type(optimizer).__name__}; give it the "
                f"smp.DistributedOptimizer, which sees the gradients of all ranks."
            )
        return _unscale_everywhere(self, optimizer, inv_scale, found_inf, allow_fp16)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Moves the scale after a step.

        Args:
            new_scale: taken as it is; None: halved after an overflow, doubled after
                `growth_interval` steps without one.

        Raises:
            StepError: gradients overflow however small the scale is.
        """
        if not self._enabled:
            return
        _refuse_inside("update")
        if new_scale is not None:
            super().update(float(new_scale))
            return
        states = self._per_optimizer_states.values()
        found = [float(value) for one in states for value in one["found_inf_per_device"].values()]
        scale = self.get_scale()
        super().update()
        self._step += 1
        if not any(found):
            self._last_finite = self._step
        elif scale <= _SMALLEST:
            raise StepError(overflow_text(scale, self._step, self._last_finite))


def _refuse_inside(method: str) -> None:
    """Checks that a scaler's method is called outside of step functions."""
    if current_recorder() is not None:
        raise StepError(
            f"GradScaler.{method}() was called in a step function{at_user_line()}, which is "
            f"captured once. Call it after the step call."
        )


def _refuse_with_keys() -> None:
    """Checks that the model is trained neither in bfloat16, which needs no scale, nor by `fp16`."""
    if is_initialized() and current().config.bf16:
        raise MpxlaError(
            f"GradScaler.scale was called{at_user_line()} with bf16: True. bfloat16 has the "
            f"range of float32, so nothing has to be scaled: use GradScaler(enabled=False)."
        )
    if is_initialized() and current().config.fp16:
        raise MpxlaError(
            f"GradScaler.scale was called{at_user_line()} with fp16: True, whose "
            f"DistributedOptimizer scales losses already: use GradScaler(enabled=False), and "
            f"give the scale to smp.DistributedOptimizer."
        )


def _scaled(outputs: Any, scale: torch.Tensor) -> Any:
    """A tensor of a step, or several in a container, times the scale, a scalar of the host."""
    if isinstance(outputs, torch.Tensor):
        return outputs * scale
    if isinstance(outputs, Iterable):
        found = [_scaled(output, scale) for output in outputs]
        return tuple(found) if isinstance(outputs, tuple) else found
    raise ValueError("outputs must be a Tensor or an iterable of Tensors")
