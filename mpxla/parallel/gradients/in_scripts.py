"""`param.grad` in the hands of scripts, where the gradient is on something else.

Of a master. Torch ties a gradient's type to its tensor's, and the gradient of a master is wider.
Scripts clip, log and change `param.grad` of the model's 16-bit parameters all the same: it reads
and writes the master's. What autograd leaves on such a parameter, after a backward outside of step
functions, moves to its master when somebody looks.

This module must not know who makes masters.
"""

from typing import Any, cast

import torch
from torch import nn

__all__ = [
    "LinkedParameter",
    "lend_gradient",
    "own_gradient",
    "set_own_gradient",
]

_MASTER = "_mpxla_master"
_gradient = cast(Any, torch.Tensor.grad)


def own_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient that is on a tensor itself."""
    return _gradient.__get__(tensor)


def set_own_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Exchanges the gradient that is on a tensor itself."""
    _gradient.__set__(tensor, gradient)


class LinkedParameter(nn.Parameter):
    """A parameter that finds its gradient through an attribute of this name."""

    link: str

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is an ordinary parameter, which a step may read: no other class has fakes."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files and copies in other processes are of an ordinary parameter."""
        plain = nn.Parameter(self.data, self.requires_grad)
        vars(plain).update({key: value for key, value in vars(self).items() if key != self.link})
        return plain.__reduce_ex__(protocol)


class MasteredParameter(LinkedParameter):
    """A parameter with a master."""

    link = _MASTER

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The master's gradient, with what is on the parameter itself."""
        own, master = own_gradient(self), vars(self).get(_MASTER)
        if master is None:  # a copy
            return own
        if own is not None:
            set_own_gradient(self, None)
            wide = own.to(master.dtype)
            master.grad = wide if master.grad is None else master.grad + wide
        return master.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:  # type: ignore[override]
        master = vars(self).get(_MASTER)
        set_own_gradient(self, value if master is None else None)
        if master is not None:
            master.grad = None if value is None else value.to(master.dtype)


def lend_gradient(parameter: nn.Parameter, master: nn.Parameter) -> None:
    """Lets a parameter, which stays the same object, show the gradient of its master."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = MasteredParameter
        vars(parameter)[_MASTER] = master
