"""Which plain values outside of its arguments a step function reads while it is captured.

Attributes of modules and of other objects that it is given or names, its globals and its closure:
their values become part of the program. What was read is remembered, so that a later change is
noticed; attributes that the step itself changes would change once per capture only: a warning says
so. This module must not know what is done with what was read.
"""

import contextlib
import types
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from mpxla.graph.capture import current_recorder
from mpxla.graph.exchanged import exchanged
from mpxla.graph.reach import direct_places
from mpxla.graph.user_code import at_user_line
from mpxla.log import warn_once

__all__ = ["AttributeLog", "Read", "attributes_noted", "kept", "outside_values"]

_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device, Enum)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_CONTAINERS = (list, tuple)
_MOST_ELEMENTS = 64
_OF_TORCH = frozenset(vars(nn.Module()))
_MISSING = object()
_MADE_BY_PYTHON, _IMMUTABLE = 1 << 9, 1 << 8
"""CPython's flags of types."""


@dataclass(frozen=True, eq=False)
class Read:
    """A value that a step read.

    Attributes:
        name: for the user.
        value: what it was; of a list a copy.
        now: gives what it is.
    """

    name: str
    value: Any
    now: Callable[[], Any]

    def is_same(self) -> bool:
        """Whether it is what it was."""
        return _is_same(self.now(), self.value)


def _is_same(now: Any, value: Any) -> bool:
    # 1, 1.0 and True are equal for Python and make different programs.
    return now is value or (type(now) is type(value) and bool(now == value))


@dataclass
class AttributeLog:
    """What a step function did with attributes of modules.

    Attributes:
        names: name of a module by the id of its table of attributes.
        first: values at the first read, by table's id and attribute.
        written: the user's line of the first write, and the value of the last one. Export puts
            the value back that was there before (torch 2.13), or leaves it (2.9).
    """

    names: dict[int, tuple[str, dict[str, Any]]]
    first: dict[tuple[int, str], Any] = field(default_factory=dict)
    written: dict[tuple[int, str], tuple[str, Any]] = field(default_factory=dict)

    def note_read(self, owner: dict[str, Any], key: str, value: Any) -> None:
        """Notes a read, if the value is plain and was not made by the step itself."""
        place = id(owner), key
        if place in self.first or place in self.written or id(owner) not in self.names:
            return
        if key not in _OF_TORCH and _is_plain(value):
            self.first[place] = _copied(value)

    def note_write(self, owner: dict[str, Any], key: str, value: Any) -> None:
        """Notes a write, with the line."""
        place = id(owner), key
        if id(owner) in self.names:
            line = self.written[place][0] if place in self.written else at_user_line()
            self.written[place] = line, value

    def reads(self) -> list[Read]:
        """What the captured step depends on: what was read, and not changed by the step."""
        found: list[Read] = []
        for (owner_id, key), value in self.first.items():
            name, owner = self.names[owner_id]
            read = Read(f"{name}.{key}", value, partial(owner.get, key, _MISSING))
            if (owner_id, key) not in self.written:
                found.append(read)
                continue
            line, last = self.written[owner_id, key]
            if not read.is_same() or not _is_same(last, value):
                _warn(read.name, line)
        return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return len(value) <= _MOST_ELEMENTS and all(isinstance(v, _PLAIN) for v in value)
    return isinstance(value, (*_PLAIN, *_FUNCTIONS))


def _copied(value: Any) -> Any:
    return list(value) if type(value) is list else value


def _warn(name: str, line: str) -> None:
    warn_once(
        f"changed attribute {name}",
        f"the step function reads and changes {name}{line}. It is captured once per program, so "
        f"that the change happens then, and not in every step or microbatch. Make it a buffer "
        f"(register_buffer), or change it outside of the step function.",
    )


@contextlib.contextmanager
def attributes_noted(
    model: nn.Module, objects: Sequence[tuple[str, Any]] = ()
) -> Generator[AttributeLog]:
    """Notes what a step function that is captured inside does with attributes.

    Those of the model's modules count, and of the other objects, which have names.
    """
    found = [(f"model.{path}" if path else "model", m) for path, m in model.named_modules()]
    found = [
        (f"{name}.{path}" if path else name, m)
        for name, value in objects
        if isinstance(value, nn.Module)
        for path, m in value.named_modules()
    ] + found
    others = [(name, value) for name, value in objects if _has_attributes(value)]
    log = AttributeLog({id(vars(v)): (name, vars(v)) for name, v in (*others, *found)})
    with contextlib.ExitStack() as stack:
        for kind in {nn.Module, *(type(value) for _, value in others)}:
            stack.enter_context(_class_noted(kind, log))
        yield log


def _has_attributes(value: Any) -> bool:
    """Whether it is an object of a class of Python code whose attributes are plain to look at."""
    kind = type(value)
    is_other = isinstance(value, (type, types.ModuleType, nn.Module, torch.Tensor, *_FUNCTIONS))
    own_access = kind.__getattribute__ is object.__getattribute__
    is_open = kind.__flags__ & _MADE_BY_PYTHON and not kind.__flags__ & _IMMUTABLE
    return bool(is_open) and own_access and not is_other and hasattr(value, "__dict__")


def outside_values(function: Callable[..., Any]) -> tuple[list[Read], list[tuple[str, Any]]]:
    """Plain globals and closed-over values of a function, and the other objects among them."""
    found = direct_places(function)
    plain = [p for p in found if _is_plain(p.value) and not isinstance(p.value, _FUNCTIONS)]
    reads = [Read(p.name, _copied(p.value), p.get) for p in plain]
    return reads, [(p.name, p.value) for p in found if not _is_plain(p.value)]


def kept(reads: Sequence[Read]) -> list[Read]:
    """Those whose value the capture itself has not changed; a warning names the others.

    What a step function counts or collects changes with every capture, and would ask for the next.
    """
    for read in (read for read in reads if not read.is_same()):
        _warn(read.name, "")
    return [read for read in reads if read.is_same()]


@contextlib.contextmanager
def _class_noted(kind: Any, log: AttributeLog) -> Generator[None]:
    """Notes what is read and written of the objects of a class."""
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
            log.note_write(object.__getattribute__(self, "__dict__"), name, value)
        set_attribute(self, name, value)

    with exchanged(kind, __getattribute__=get, __setattr__=set_noted):
        yield
