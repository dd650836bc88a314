"""Loss scales: how they move, and gradients that are freed of them.

Gradients of float16 activations vanish below 6e-8, so the loss is multiplied before it is
differentiated, and the gradients are divided before the update (Micikevicius et al., "Mixed
precision training", 2018, section 3.2). Where they overflow, the update is left out on all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mpxla.comm.transport import Transport
from mpxla.device.backend import Buffer
from mpxla.errors import ConfigError, StepError
from mpxla.parallel.programs import Programs
from mpxla.parallel.store import exchange_gradients

__all__ = ["LossScale", "Unscaling"]

_DYNAMIC = {
    "init_scale": 2.0**32,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}
"""Settings of dynamic scaling, with SMP's defaults."""


class LossScale:
    """The loss scale of one optimizer under `fp16: True`. (SMP API reference, "FP16 training".)

    Args:
        static: the scale, if it does not move.
        is_dynamic: whether it does.
        settings: of dynamic scaling: `init_scale`, `scale_factor`, `scale_window` (steps without
            overflow before it grows), `min_scale`, `delayed_shift` (overflows until it shrinks),
            `consecutive_hysteresis` (count them anew after every good step).

    Raises:
        ConfigError: a setting is unknown, or the scale is not positive.
    """

    def __init__(self, static: float | None, is_dynamic: bool, settings: dict[str, Any]):
        unknown = sorted(set(settings) - set(_DYNAMIC))
        if unknown:
            raise ConfigError(
                f"dynamic_loss_args has no setting {unknown[0]!r}; it has {', '.join(_DYNAMIC)}."
            )
        self._settings = _DYNAMIC | settings
        self._is_dynamic = is_dynamic
        self.value = float(self._settings["init_scale"] if is_dynamic else static or 1.0)
        if not 0 < self.value < float("inf"):
            raise ConfigError(f"the loss scale is {self.value}; give a positive number.")
        self._good_steps = 0
        self._patience = int(self._settings["delayed_shift"])
        self._step = 0
        self._last_finite: int | None = None

    def update(self, has_overflowed: bool) -> None:
        """Counts a step, and moves the scale.

        Raises:
            StepError: gradients overflow at the smallest scale.
        """
        self._step += 1
        if not has_overflowed:
            self._last_finite = self._step
        if not self._is_dynamic:
            return
        settings = self._settings
        if not has_overflowed:
            self._good_steps += 1
            if settings["consecutive_hysteresis"]:
                self._patience = int(settings["delayed_shift"])
            if self._good_steps % int(settings["scale_window"]) == 0:
                self._patience = int(settings["delayed_shift"])
                self.value *= settings["scale_factor"]
            return
        self._good_steps = 0
        if self._patience > 1:
            self._patience -= 1
            return
        if self.value <= settings["min_scale"]:
            raise StepError(overflow_text(self.value, self._step, self._last_finite))
        self.value = max(self.value / settings["scale_factor"], settings["min_scale"])

    def state_dict(self) -> dict[str, Any]:
        """What changes."""
        return {
            "value": self.value,
            "good_steps": self._good_steps,
            "patience": self._patience,
            "step": self._step,
            "last_finite": self._last_finite,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on as another one would."""
        self.value = float(state["value"])
        self._good_steps, self._patience = int(state["good_steps"]), int(state["patience"])
        self._step, self._last_finite = int(state["step"]), state["last_finite"]


def overflow_text(scale: float, step: int, last_finite: int | None) -> str:
    """What the user reads when no scale is small enough."""
    last = (
        "no step before had finite gradients"
        if last_finite is None
        else (f"the last step with finite gradients was number {last_finite}")
    )
    return (
        f"gradients of step {step} are inf or nan at the loss scale {scale:g}, the smallest; "
        f"{last} (counted by optimizer.step()). The model itself overflows: lower the learning "
        f"rate, clip gradients, keep losses and reductions in float32, or train with bf16: True."
    )


def _num_bad(*gradients: torch.Tensor) -> list[torch.Tensor]:
    """How many gradients have elements that are not finite [1]."""
    # Each by itself: a sum of elements could overflow where no element has.
    bad = [(~torch.isfinite(g)).any().float() for g in gradients]
    return [torch.stack(bad).sum().reshape(1)]


def _scaled(factor: torch.Tensor, *gradients: torch.Tensor) -> list[torch.Tensor]:
    """Gradients times a factor."""
    wide = [g if g.dtype == torch.float64 else g.float() for g in gradients]
    return [(w * factor).to(g.dtype) for w, g in zip(wide, gradients, strict=True)]


class Unscaling:
    """Divides gradients by a loss scale, and finds out whether some rank's have overflowed.

    The ranks are all that train; they call together.
    """

    def __init__(self, programs: Programs, transport: Transport, ranks: Sequence[int]):
        self._programs = programs
        self._transport = transport
        self._ranks = tuple(ranks)

    def __call__(self, owners: Sequence[nn.Parameter], scale: float) -> bool:
        """Divides the gradients of this rank in place. Waits for them; all ranks must call it.

        Returns:
            Whether some gradient of some rank is inf or nan.
        """
        number = self._num_bad(owners)
        self.multiply(owners, 1.0 / scale)
        if len(self._ranks) > 1:
            number = self._transport.all_gather(number, self._ranks).result()
        return bool(self._programs.backend.view(number).sum().item() > 0)

    def _num_bad(self, owners: Sequence[nn.Parameter]) -> Buffer:
        """How many gradients of this rank are inf or nan somewhere [1]."""
        held = self._programs.backend.adopt([p.grad for p in owners if p.grad is not None])
        if not held:
            return torch.zeros(1, dtype=torch.float32)
        # Not in the program that scales: XLA would copy what it reads and writes.
        return self._programs.run("finite gradients", _num_bad, (), held)[0]

    def multiply(self, owners: Sequence[nn.Parameter], factor: float) -> None:
        """Multiplies the gradients of this rank."""
        backend = self._programs.backend
        owners = [owner for owner in owners if owner.grad is not None]
        if not owners:
            return
        given = self._programs.number(factor, torch.float32)

        def scaled(gradients: Sequence[Buffer]) -> list[Buffer]:
            donated = range(1, 1 + len(gradients))
            return self._programs.run("loss scale", _scaled, (), [given, *gradients], donated)

        exchange_gradients(owners, backend, scaled)
