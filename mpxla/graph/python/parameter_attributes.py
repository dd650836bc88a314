"""What users have set on parameters, while a step is captured: `weight._no_decay = True`.

They are noted like attributes of modules. Tensors among them are the business of
`capture/tensor_places.py`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from mpxla.graph.containers import has_tensors
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


def parameters_noted(is_own: Callable[[Any], bool], log: Any) -> AbstractContextManager[None]:
    """Notes what is read and written of parameters.

    Args:
        is_own: whether something is a parameter of the model that is captured.
        log: an `AttributeLog`.
    """
    get_attribute, set_attribute = nn.Parameter.__getattribute__, nn.Parameter.__setattr__
    of_torch = frozenset(dir(nn.Parameter))

    def is_noted(parameter: Any, name: str) -> bool:
        is_users = name not in of_torch and not name.startswith(("__", "_mpxla"))
        return is_users and is_own(parameter)

    def get(self: Any, name: str) -> Any:
        if is_noted(self, name) and is_called_by_user():
            value = vars(self).get(name, MISSING)
            if not has_tensors(value):
                log.note_read(vars(self), name, value)
        return get_attribute(self, name)

    def set_noted(self: Any, name: str, value: Any) -> None:
        if is_noted(self, name) and not has_tensors(value) and is_called_by_user():
            log.note_write(vars(self), name, vars(self).get(name, MISSING), value)
        set_attribute(self, name, value)

    return exchanged(nn.Parameter, __getattribute__=get, __setattr__=set_noted)
