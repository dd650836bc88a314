"""How tensors that an optimizer keeps beside its parameters get to the device, whole or in part."""

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from mpxla.errors import MpxlaError
from mpxla.parallel.companions import Heir
from mpxla.parallel.update_copy import UpdateCopy
from mpxla.runtime.state import ModelState
from mpxla.session import Session

__all__ = ["Carrier", "equalize_beside"]


class Carrier:
    """Makes heirs of parameters for `companions.follow_parameters`.

    Args:
        kind: class of the optimizer, for errors.
        states: parameters of the optimizer's models.
        device: this rank's.
    """

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


def equalize_beside(session: Session, tensors: Sequence[torch.Tensor]) -> None:
    """Gives all replicas the tensors of the first, as they were given its parameters.

    Copies of parameters that were made before differ where replicas have different random seeds.
    All ranks call it.

    Args:
        session: the session.
        tensors: what an optimizer keeps beside its parameters; those on a device stay.
    """
    group = session.topology.rdp_group(session.rank)
    hosted = [t for t in tensors if t.device.type == "cpu" and t.dim() > 0]
    if len(group) == 1 or not hosted:
        return
    digests = [_digest(tensor) for tensor in hosted]
    everyone = session.objects.allgather(digests, group)
    for number, tensor in enumerate(hosted):
        if any(other[number] != everyone[0][number] for other in everyone):
            value = session.transport.broadcast(tensor.detach().contiguous(), group[0], group)
            with torch.no_grad():
                tensor.copy_(value.result())


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.md5(flat.numpy()).hexdigest()}"
