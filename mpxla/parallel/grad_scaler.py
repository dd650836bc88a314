"""`smp.amp.GradScaler`: loss scaling under autocast, as in `torch.amp`.

    with torch.autocast("xla", dtype=torch.float16): loss = ...
    model.backward(scaler.scale(loss))       in the step function
    scaler.step(optimizer); scaler.update()  after it

The scale is a tensor that captured steps read anew in every call, so a changed one compiles
nothing.
"""

from collections.abc import Iterable
from typing import Any

import torch

from mpxla.errors import MpxlaError, StepError
from mpxla.graph.capture import current_recorder
from mpxla.graph.user_code import at_user_line
from mpxla.parallel.loss_scale import overflow_text
from mpxla.session import current, is_initialized

__all__ = ["GradScaler", "refuse_inside", "refuse_unused", "refuse_with_keys", "scaled"]

_SMALLEST = 2.0**-40
"""Below it the scale only loses digits: torch's scaler would go on halving for ever."""
_SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")


class GradScaler:
    """Scales losses, and skips updates whose gradients have overflowed on any rank.

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
        self._growth_factor = float(given.get("growth_factor", 2.0))
        self._backoff_factor = float(given.get("backoff_factor", 0.5))
        self._growth_interval = int(given.get("growth_interval", 2000))
        self._enabled = bool(given.get("enabled", True))
        if not (self._growth_factor > 1.0 > self._backoff_factor > 0.0):
            raise ValueError("growth_factor must be above 1, backoff_factor between 0 and 1")
        # On the host, and changed in place: captured steps hold this very tensor.
        self._scale = torch.tensor(float(given.get("init_scale", 2.0**16)))
        self._growth_tracker = 0
        self.has_scaled = False
        self._found: dict[int, bool] = {}
        self._step = 0
        self._last_finite: int | None = None

    def is_enabled(self) -> bool:
        """Whether it scales."""
        return self._enabled

    def scale(self, outputs: Any) -> Any:
        """A loss, or several in a container, times the scale.

        Raises:
            MpxlaError: a key of the configuration does it, or makes it needless.
        """
        if not self._enabled:
            return outputs
        refuse_with_keys()
        self.has_scaled = True
        return scaled(outputs, self._scale)

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients of an optimizer by the scale. All ranks must call it.

        Args:
            optimizer: a `DistributedOptimizer`.

        Raises:
            RuntimeError: they are divided already.
            StepError: no step function has used this scaler.
        """
        if not self._enabled:
            return
        refuse_inside("unscale_")
        if id(optimizer) in self._found:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        refuse_unused(self)
        unscale = getattr(optimizer, "unscale_gradients", None)
        if unscale is None:
            raise MpxlaError(
                f"GradScaler was given a {type(optimizer).__name__}; give it the "
                f"smp.DistributedOptimizer, which sees the gradients of all ranks."
            )
        self._found[id(optimizer)] = unscale(float(self._scale))

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()`, unless gradients have overflowed. All ranks must call it.

        Args:
            optimizer: a `DistributedOptimizer`.
            *args: handed on.
            **kwargs: handed on.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        return None if self._found[id(optimizer)] else optimizer.step(*args, **kwargs)

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
        refuse_inside("update")
        has_overflowed, known = any(self._found.values()), bool(self._found)
        self._found.clear()
        if new_scale is not None:
            self._scale.fill_(float(new_scale))
            return
        if not known:
            raise RuntimeError("No inf checks were recorded prior to update.")
        self._step += 1
        if not has_overflowed:
            self._last_finite = self._step
            self._growth_tracker += 1
            grown = self._scale * self._growth_factor
            if self._growth_tracker == self._growth_interval:
                self._growth_tracker = 0
                if bool(torch.isfinite(grown)):
                    self._scale.copy_(grown)
            return
        self._growth_tracker = 0
        if float(self._scale) <= _SMALLEST:
            raise StepError(overflow_text(float(self._scale), self._step, self._last_finite))
        self._scale.mul_(self._backoff_factor)

    def get_scale(self) -> float:
        """The scale; 1.0 where it is not enabled.

        Raises:
            StepError: called in a step function, which would keep the number of its capture.
        """
        if not self._enabled:
            return 1.0
        refuse_inside("get_scale")
        return float(self._scale)

    def get_growth_factor(self) -> float:
        """What the scale grows by."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets it."""
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """What the scale shrinks by."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets it."""
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """Steps without overflow before the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets it."""
        self._growth_interval = new_interval

    def state_dict(self) -> dict[str, Any]:
        """As torch's; empty where it is not enabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state, torch's too.

        Raises:
            RuntimeError: it is of a scaler that was not enabled.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled "
                "instance of GradScaler."
            )
        self._scale.fill_(float(state_dict["scale"]))
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._growth_tracker = state_dict["_growth_tracker"]


def refuse_inside(method: str) -> None:
    """Checks that a scaler's method is called outside of step functions.

    Raises:
        StepError: it is not.
    """
    if current_recorder() is not None:
        raise StepError(
            f"GradScaler.{method}() was called in a step function{at_user_line()}, which is "
            f"captured once. Call it after the step call."
        )


def refuse_unused(scaler: Any) -> None:
    """Checks that a scaler has scaled a loss before gradients are divided by its scale.

    Args:
        scaler: has `has_scaled` once it has.

    Raises:
        StepError: it has not.
    """
    if not getattr(scaler, "has_scaled", False):
        raise StepError(
            "GradScaler.unscale_ or step was called, but this scaler has scaled no loss: the "
            "step function was captured with another one, or calls model.backward(loss). Make "
            "one scaler before the first step, and call model.backward(scaler.scale(loss))."
        )


def refuse_with_keys() -> None:
    """Checks that no key of the configuration excludes a scaler.

    Raises:
        MpxlaError: the model is trained in bfloat16, which needs no scale, or by `fp16: True`.
    """
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


def scaled(outputs: Any, scale: torch.Tensor) -> Any:
    """A tensor, or several in a container, times the scale, a scalar of the host.

    Raises:
        ValueError: they are something else.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs * (scale if current_recorder() is not None else scale.to(outputs.device))
    if isinstance(outputs, Iterable):
        found = [scaled(output, scale) for output in outputs]
        return tuple(found) if isinstance(outputs, tuple) else found
    raise ValueError("outputs must be a Tensor or an iterable of Tensors")
