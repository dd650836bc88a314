"""What users have set on parameters, while a step is captured: `weight._no_decay = True`.

A stand-in takes the place of each parameter then. What it does not have is looked up on the
parameter itself, and noted like attributes of modules; what it is given goes there, too. Tensors
among them are the business of `capture/tensor_places.py`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from mpxla.graph.exchanged import exchanged
from mpxla.graph.python.held_objects import Held
from mpxla.graph.python.plain import MISSING
from mpxla.graph.user_code import is_called_by_user

__all__ = ["HeldParameter", "held_parameters", "parameters_noted"]


@dataclass(eq=False)
class HeldParameter(Held):
    """A parameter, which partitioning may put another tensor in the place of.

    Attributes:
        module: that has it.
        key: its name there.
    """

    module: nn.Module | None = None
    key: str = ""

    @property
    def table(self) -> dict[str, Any]:
        """The attributes of the parameter that is there now."""
        assert self.module is not None, "it was made with one"
        parameter = self.module._parameters.get(self.key)  # pyright: ignore[reportPrivateUsage]
        return {} if parameter is None else vars(parameter)

    def reader(self, key: str) -> Callable[[], Any]:
        """Gives an attribute in every call of a step."""
        return partial(self.get, key)


def held_parameters(held: Iterable[Held]) -> dict[int, Held]:
    """The parameters of modules among some objects, by the ids of their attributes."""
    return {
        id(vars(parameter)): HeldParameter(f"{one.name}.{key}", None, module=one.value, key=key)
        for one in held
        if isinstance(one.value, nn.Module)
        for key, parameter in one.value._parameters.items()  # pyright: ignore[reportPrivateUsage]
        if parameter is not None
    }


def parameters_noted(
    parameter_of: Callable[[torch.Tensor], torch.Tensor | None], log: Any
) -> AbstractContextManager[None]:
    """Notes what is read and written of parameters by their stand-ins.

    Args:
        parameter_of: the parameter that a tensor stands for, if it is a stand-in.
        log: an `AttributeLog`.
    """
    set_attribute: Any = FakeTensor.__setattr__
    of_torch = frozenset(dir(FakeTensor))  # a capture sets tens of thousands

    def get(self: torch.Tensor, name: str) -> Any:  # which Python calls after it has found nothing
        parameter = None if name.startswith("__") else parameter_of(self)
        value = MISSING
        if parameter is not None and is_called_by_user():
            value = vars(parameter).get(name, MISSING)
            if not _has_tensors(value):
                log.note_read(vars(parameter), name, value)
        if value is MISSING or _has_tensors(value):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return value

    def set_noted(self: torch.Tensor, name: str, value: Any) -> None:
        parameter = None if name in of_torch else parameter_of(self)
        is_noted = parameter is not None and name not in vars(self) and not _has_tensors(value)
        if not is_noted or not is_called_by_user():
            set_attribute(self, name, value)
            return
        log.note_write(vars(parameter), name, value)
        vars(parameter)[name] = value

    return exchanged(FakeTensor, __getattr__=get, __setattr__=set_noted)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
