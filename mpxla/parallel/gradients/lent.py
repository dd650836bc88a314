"""`param.grad` of parameters whose gradients replicas divide, as scripts read and change it.

Each replica has a piece. What a script does with the gradient between the step and the update, it
does on all replicas, as with `DistributedDataParallel`:

    read      pieces  -- gather -->  whole, which the script sees and may change
    assigned  the script's tensor is the whole
    used      each replica cuts its piece out of the whole: by the update, clipping, the next pass

This file must not know how replicas meet.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mpxla.device.backend import Backend
from mpxla.errors import StepError
from mpxla.graph.user_code import at_user_line
from mpxla.parallel.gradients.in_scripts import LinkedParameter, own_gradient, set_own_gradient
from mpxla.parallel.state_dicts import to_host
from mpxla.parallel.updates.copy import UpdateCopy
from mpxla.runtime.divided import DividedParameter

__all__ = ["Gather", "LentGradients", "gradient_here"]

Gather = Callable[[str, str, Any], list[Any]]
"""(name of a parameter, the user's line, an object) -> the objects of all replicas."""

_LENDER = "_mpxla_lender"


def gradient_here(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter as far as it is on this rank; no other rank has to ask."""
    if not isinstance(tensor, _Lent):
        return tensor.grad
    lender = vars(tensor).get(_LENDER)
    own = own_gradient(tensor)
    return own if own is not None or lender is None else lender.known()


class _Lent(torch.Tensor):
    """A parameter whose gradient replicas divide."""

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The whole gradient; all replicas have to ask for it.

        Raises:
            RankMismatch: another replica does something else.
        """
        own, lender = own_gradient(self), vars(self).get(_LENDER)
        # Copies have no lender. What autograd leaves here is an error at the next update.
        return own if own is not None or lender is None else lender.read()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:  # type: ignore[override]
        lender = vars(self).get(_LENDER)
        if lender is None or (value is not None and value.is_meta):
            set_own_gradient(self, value)  # one without values is an error at the next update
            return
        if value is not None:  # torch checks it
            set_own_gradient(self, value.to("meta" if self.is_meta else value.device, self.dtype))
        set_own_gradient(self, None)
        lender.write(value)


class LentParameter(_Lent, LinkedParameter):  # pyright: ignore[reportIncompatibleVariableOverride]
    """One that is whole on this rank."""

    link = _LENDER


class LentDivided(_Lent, DividedParameter):  # pyright: ignore[reportIncompatibleVariableOverride]
    """One that replicas divide themselves."""


_KINDS: dict[type, type] = {nn.Parameter: LentParameter, DividedParameter: LentDivided}


class _Lender:
    """The way from one parameter to its gradient."""

    def __init__(self, gradients: "LentGradients", name: str):
        self._gradients = gradients
        self._name = name

    def known(self) -> torch.Tensor | None:
        return self._gradients.known(self._name)

    def read(self) -> torch.Tensor | None:
        return self._gradients.read(self._name)

    def write(self, value: torch.Tensor | None) -> None:
        self._gradients.write(self._name, value)


class LentGradients:
    """Gradients of one model that scripts have seen, until they are used.

    Args:
        copy_of: the update copy of a parameter here, if there is one.
        waiting: gradients of passes before the last one, which are not reduced yet.
        backend: of this rank's device.
    """

    def __init__(
        self,
        copy_of: Callable[[str], UpdateCopy | None],
        waiting: dict[str, Any],
        backend: Backend,
    ):
        self.gather: Gather | None = None
        self._copy_of = copy_of
        self._waiting = waiting
        self._backend = backend
        self._shapes: dict[str, tuple[int, ...]] = {}
        # The whole, and what its piece was then (with its version): the script may change either.
        self._wholes: dict[str, tuple[torch.Tensor, Any]] = {}

    def lend(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Lets parameters, which stay the same objects, show whole gradients."""
        for name, parameter in parameters.items() if self.gather is not None else ():
            if type(parameter) in _KINDS:
                parameter.__class__ = _KINDS[type(parameter)]
                vars(parameter)[_LENDER] = _Lender(self, name)
                self._shapes[name] = tuple(parameter.shape)

    def known(self, name: str) -> torch.Tensor | None:
        """What a script has seen or put there, if it was not used yet."""
        return self._wholes[name][0] if name in self._wholes else None

    def read(self, name: str) -> torch.Tensor | None:
        """The whole gradient; None without one. All replicas call it."""
        if name in self._wholes or name in self._waiting:
            return self.known(name)
        assert self.gather is not None, "parameters that are lent have a way to gather"
        copy, piece = self._copy_of(name), None
        if copy is not None and copy.extent is not None and copy.parameter.grad is not None:
            piece = copy.extent[0], to_host(copy.parameter.grad.detach(), self._backend)
        pieces = [p for p in self.gather(name, at_user_line(), piece) if p is not None]
        if not pieces:
            return None
        # Groups that hold parameters together have equal gradients, of which one is enough.
        flat = torch.cat([values for _, values in sorted(dict(pieces).items())])
        whole = flat.reshape(self._shapes[name])
        (value,) = self._backend.publish(self._backend.put([whole]))
        self._wholes[name] = value, self._mark(name)
        return value

    def write(self, name: str, value: torch.Tensor | None) -> None:
        """Takes the tensor of a script for the gradient.

        Raises:
            StepError: gradients of earlier passes wait for their reduction.
        """
        if value is None:
            self._waiting.pop(name, None)
        elif name in self._waiting:
            raise StepError(
                f"param.grad of {name} was assigned{at_user_line()} before the last of "
                f"backward_passes_per_step passes, when replicas have not reduced it yet. Do so "
                f"after the last one, or call optimizer.zero_grad()."
            )
        self._wholes.pop(name, None)
        copy = self._copy_of(name)
        if value is not None:
            self._wholes[name] = value, None
        elif copy is not None:
            set_own_gradient(copy.parameter, None)

    def _mark(self, name: str) -> Any:
        copy = self._copy_of(name)
        gradient = None if copy is None else copy.parameter.grad
        return id(gradient), None if gradient is None else gradient._version

    def settle(self) -> None:
        """Pieces take what scripts have made of the whole."""
        wholes, self._wholes = self._wholes, {}
        owners: list[nn.Parameter] = []
        values: list[torch.Tensor] = []
        for name, (whole, mark) in wholes.items():
            copy = self._copy_of(name)
            # None is what it was assigned; who has changed pieces after reading means those.
            if copy is not None and copy.extent is not None and mark in (None, self._mark(name)):
                owners.append(copy.parameter)
                piece = whole.detach().reshape(-1)[slice(*copy.extent)]
                # Not a view: what updates it may donate its memory.
                values.append(piece.to(copy.parameter.device, copy.parameter.dtype, copy=True))
        if owners:
            for owner, value in zip(
                owners, self._backend.publish(self._backend.adopt(values)), strict=True
            ):
                set_own_gradient(owner, value)

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Drops what scripts have seen, of all parameters if none are named."""
        for name in list(self._wholes) if names is None else names:
            self._wholes.pop(name, None)
