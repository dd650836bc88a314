"""How tensors that an optimizer keeps beside its parameters get to the device, whole or in part."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from mpxla.errors import MpxlaError
from mpxla.parallel.replica import equalize_beside
from mpxla.parallel.updates.companions import Heir, follow_parameters, tensors_beside
from mpxla.parallel.updates.copy import UpdateCopy
from mpxla.runtime.state import ModelState
from mpxla.session import Session

__all__ = ["Carrier", "take_along"]


class Carrier:
    """Makes heirs of parameters for `companions.follow_parameters`."""

    def __init__(self, kind: type, states: Sequence[ModelState], device: torch.device):
        self._kind = kind.__name__
        self._states = states
        self._device = device

    def whole(self, parameter: nn.Parameter) -> Heir:
        """A parameter that stays as it is."""

        def convert(value: torch.Tensor) -> torch.Tensor:
            return value if value is parameter else self.move(value)

        return Heir(parameter, "whole", convert)

    def copy(self, update_copy: UpdateCopy) -> Heir:
        """An update copy in the place of its parameter."""
        extent = update_copy.extent

        def convert(value: torch.Tensor) -> torch.Tensor:
            if self._former_owner(value) is not None:
                what = "float32 copies" if extent is None else "flat pieces"
                raise MpxlaError(
                    f"{self._kind} keeps a tensor that shares the memory of a parameter, and "
                    f"is given {what} of parameters instead (shard_optimizer_state, or mixed "
                    f"precision). Keep copies (.clone())."
                )
            if extent is None:
                return self.move(value)
            return self.move(_like(value, value.detach().reshape(-1)[slice(*extent)].clone()))

        return Heir(update_copy.parameter, "whole" if extent is None else extent, convert)

    def move(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor on the device; numbers stay where they are."""
        if value.device == self._device or value.dim() == 0:
            return value
        if value.is_meta:
            raise MpxlaError(
                f"{self._kind} keeps a tensor of shape {list(value.shape)} that has no values: it "
                f"was made from a parameter without any (smp.delay_param_initialization). Make the "
                f"optimizer after the first step."
            )
        owner = self._former_owner(value)
        if owner is None:
            return _like(value, value.detach().to(self._device))
        if owner.numel() != value.numel():
            raise MpxlaError(
                f"{self._kind} keeps a part of a parameter of shape {list(owner.shape)} that "
                f"shares its memory; keep a copy (.clone()), or the parameter itself."
            )
        return owner.detach().view(value.shape)

    def _former_owner(self, value: torch.Tensor) -> nn.Parameter | None:
        found = (state.former_owner(value) for state in self._states)
        return next((owner for owner in found if owner is not None), None)


def _like(value: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(moved, value.requires_grad)
    return moved.requires_grad_(value.requires_grad)


def take_along(
    session: Session,
    optimizer: torch.optim.Optimizer,
    before: Sequence[Sequence[nn.Parameter]],
    states: Sequence[ModelState],
    heir: Callable[[nn.Parameter], tuple[bool, UpdateCopy | None]],
) -> None:
    """What an optimizer keeps of its parameters outside of its state follows them.

    All ranks call it, when all its models are partitioned: its groups hold this rank's parameters,
    or copies in their places, already; `before` is what they were. The heir says whether a
    parameter has given way, and to which copy of this rank.
    """
    own = {id(p) for group in before for p in group}
    equalize_beside(session, [t for t in tensors_beside(optimizer) if id(t) not in own])
    carrier = Carrier(type(optimizer), states, session.device)

    def heirs(parameter: nn.Parameter) -> list[Heir]:
        is_exchanged, copy = heir(parameter)
        if is_exchanged:
            return [] if copy is None else [carrier.copy(copy)]
        return [] if parameter.is_meta else [carrier.whole(parameter)]

    follow_parameters(optimizer, before, heirs, carrier.move)
