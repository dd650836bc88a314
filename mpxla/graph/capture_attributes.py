"""Which plain attributes of modules a step function reads while it is captured, and changes.

Their values become part of the program. What was read is remembered, so that a later change is
noticed; what `forward` itself changes would change once per capture only: a warning says so.
This module must not know what is done with what was read.
"""

import contextlib
import types
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from mpxla.graph.capture import current_recorder
from mpxla.graph.user_code import at_user_line
from mpxla.log import warn_once

__all__ = ["AttributeLog", "Read", "attributes_noted"]

_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device, Enum)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_CONTAINERS = (list, tuple)
_MOST_ELEMENTS = 64
_OF_TORCH = frozenset(vars(nn.Module()))
_MISSING = object()


@dataclass(frozen=True, eq=False)
class Read:
    """An attribute that a step read.

    Attributes:
        owner: the table of the module's attributes.
        key: its name there.
        name: its name for the user.
        value: what it was; of a list a copy.
    """

    owner: dict[str, Any]
    key: str
    name: str
    value: Any

    def now(self) -> Any:
        """What the attribute is."""
        return self.owner.get(self.key, _MISSING)

    def is_same(self) -> bool:
        """Whether it is what it was."""
        now, value = self.owner.get(self.key, _MISSING), self.value
        # 1, 1.0 and True are equal for Python and make different programs.
        return now is value or (type(now) is type(value) and bool(now == value))


@dataclass
class AttributeLog:
    """What a step function did with attributes of modules.

    Attributes:
        names: name of a module by the id of its table of attributes.
        first: values at the first read, by table's id and attribute.
        written: the user's line of the first write.
    """

    names: dict[int, tuple[str, dict[str, Any]]]
    first: dict[tuple[int, str], Any] = field(default_factory=dict)
    written: dict[tuple[int, str], str] = field(default_factory=dict)

    def note_read(self, owner: dict[str, Any], key: str, value: Any) -> None:
        """Notes a read, if the value is plain and was not made by the step itself."""
        place = id(owner), key
        if place in self.first or place in self.written or id(owner) not in self.names:
            return
        if key not in _OF_TORCH and _is_plain(value):
            self.first[place] = list(value) if type(value) is list else value

    def note_write(self, owner: dict[str, Any], key: str) -> None:
        """Notes a write, with the line."""
        place = id(owner), key
        if place not in self.written and id(owner) in self.names:
            self.written[place] = at_user_line()

    def reads(self) -> list[Read]:
        """What the captured step depends on: what was read, and not changed by the step."""
        found: list[Read] = []
        for (owner_id, key), value in self.first.items():
            name, owner = self.names[owner_id]
            read = Read(owner, key, f"{name}.{key}", value)
            if (owner_id, key) not in self.written:
                found.append(read)
            elif not read.is_same():
                _warn(read.name, self.written[owner_id, key])
        return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return len(value) <= _MOST_ELEMENTS and all(isinstance(v, _PLAIN) for v in value)
    return isinstance(value, (*_PLAIN, *_FUNCTIONS))


def _warn(name: str, line: str) -> None:
    warn_once(
        f"changed attribute {name}",
        f"the step function reads and changes {name}{line}. It is captured once per program, so "
        f"that the change happens then, and not in every step or microbatch. Make it a buffer "
        f"(register_buffer), or change it outside of the step function.",
    )


@contextlib.contextmanager
def attributes_noted(model: nn.Module) -> Generator[AttributeLog]:
    """Notes what a step function that is captured inside does with attributes.

    Args:
        model: whose modules count.
    """
    names = {
        id(vars(module)): (f"model.{path}" if path else "model", vars(module))
        for path, module in model.named_modules()
    }
    log = AttributeLog(names)
    kind: Any = nn.Module
    set_attribute = kind.__setattr__

    def get(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if current_recorder() is not None:
            # Export reads through proxies of modules, which share their tables.
            owner = object.__getattribute__(self, "__dict__")
            if name in owner:
                log.note_read(owner, name, value)
        return value

    def set_noted(self: Any, name: str, value: Any) -> None:
        if current_recorder() is not None and not isinstance(value, (torch.Tensor, nn.Module)):
            log.note_write(object.__getattribute__(self, "__dict__"), name)
        set_attribute(self, name, value)

    kind.__getattribute__, kind.__setattr__ = get, set_noted
    try:
        yield log
    finally:
        del kind.__getattribute__
        kind.__setattr__ = set_attribute
