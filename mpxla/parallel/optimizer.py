"""`DistributedOptimizer`: the user's optimizer, restricted to this rank's parameters.

Parameters keep their identity when the model is partitioned, so param groups, optimizer state and
LR schedulers stay as they are; what other ranks own is taken out of the groups.
"""

from collections.abc import Callable
from typing import Any

import torch

from mpxla.errors import ConfigError, MpxlaError
from mpxla.session import current
from mpxla.stage.device import flush

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a `torch.optim` optimizer for a distributed model.

    Build the inner optimizer from the raw model's parameters before wrapping, or from
    `DistributedModel.parameters()`. The wrapper shares `param_groups`, `state` and `defaults` with
    it, so that LR schedulers work on either. (SMP API reference, "DistributedOptimizer".)

    Args:
        optimizer: the optimizer to wrap.
        static_loss_scale: loss scale of fp16 training; only 1.0 is supported.
        dynamic_loss_scale: dynamic loss scaling of fp16 training; not supported.
        **dynamic_loss_args: settings of dynamic loss scaling.

    Raises:
        MpxlaError: there is no `DistributedModel` yet, or it is not a torch optimizer.
        ConfigError: loss scaling was asked for.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: Any,
    ):
        session = current()
        if session.model is None:
            raise MpxlaError(
                "smp.DistributedOptimizer was called before smp.DistributedModel; wrap the model "
                "first."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise MpxlaError(
                f"smp.DistributedOptimizer wraps a torch.optim.Optimizer, not a "
                f"{type(optimizer).__name__}."
            )
        if dynamic_loss_scale or static_loss_scale not in (None, 1.0):
            raise ConfigError(
                "loss scaling belongs to fp16 training, which mpxla does not have yet; leave "
                "static_loss_scale at 1.0 and dynamic_loss_scale at False."
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise MpxlaError("this optimizer is a DistributedOptimizer already.")
        # Optimizer.__init__ is not called: groups, state and hooks are those of the inner one.
        self.optimizer = optimizer
        self._patch_step_function()
        session.model.attach_optimizer(self)

    def _patch_step_function(self) -> None:
        """LR schedulers look at wrapped `step` functions of the instance; nothing to profile."""

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the inner optimizer, holding this rank's parameters."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Optimizer state of this rank's parameters."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Default settings of the inner optimizer."""
        return self.optimizer.defaults

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates this rank's parameters from their gradients; call outside `smp.step` functions.

        Raises:
            MpxlaError: a closure was given (it would have to run the step function).
        """
        if closure is not None:
            raise MpxlaError(
                "DistributedOptimizer.step takes no closure: call the step function, then step()."
            )
        if any(group["params"] for group in self.optimizer.param_groups):
            self.optimizer.step()
            flush()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this rank's parameters."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if not set_to_none:
            flush()

    def state_dict(self) -> dict[str, Any]:
        """State of the inner optimizer for this rank's parameters (`local_state_dict`)."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of the same rank and partition returned."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of the model to the inner optimizer."""
        self.optimizer.add_param_group(param_group)
        model = current().model
        if model is not None and model.partitioned:
            self.keep_local()

    def keep_local(self) -> None:
        """Takes parameters of other ranks out of the groups, and moves existing state."""
        for group in self.optimizer.param_groups:
            kept = [p for p in group["params"] if p.device.type != "meta"]
            dropped = [p for p in group["params"] if p.device.type == "meta"]
            group["params"] = kept
            for parameter in dropped:
                self.optimizer.state.pop(parameter, None)
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[key] = value.to(parameter.device)
