"""Objects whose attributes a step function may read, and the places where they are held.

Modules, and objects of the user's classes: in attributes of these, in globals and closures, in
arguments, and in containers in all of them. Scripts put another object in the place of one (a meter
for every epoch, another configuration): a program then goes on with the attributes of that one.

This module must not know what is read of them.
"""

import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast

import torch
from torch import nn

from mpxla.graph.python.plain import FUNCTIONS, MISSING, SIMPLE, Change, Read, entries_of
from mpxla.user_lines import is_model_code

__all__ = ["OF_TORCH", "Held", "ObjectRead", "contents_of", "held_objects", "is_looked_into"]
__all__ += ["has_attributes", "own_attributes"]

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of modules that are not the user's."""
_MADE_BY_PYTHON, _IMMUTABLE = 1 << 9, 1 << 8
"""CPython's flags of types."""
_DEPTH, _MOST_OBJECTS = 8, 5000
"""How far objects inside objects are looked for."""


@dataclass(eq=False)
class Held:
    """An object with attributes.

    Attributes:
        name: for the user.
        value: the object; another one once it was replaced.
        places: where it is held. Each gives what is there, and says of which attribute of an object
            (its table, the name) that is a part; None for a global.
        made: attributes that have got what the step had made, with that and what was there before
            (`made_objects.py`).
    """

    name: str
    value: Any
    places: list[tuple[Callable[[], Any], tuple[int, str] | None]] = field(default_factory=list)
    made: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def table(self) -> dict[str, Any]:
        """Its own attributes; nobody notes that as a read."""
        return object.__getattribute__(self.value, "__dict__")

    def get(self, key: str) -> Any:
        """An attribute or buffer of its own; MISSING if there is none."""
        return self._table_with(key).get(key, MISSING)

    def reader(self, key: str) -> Callable[[], Any]:
        """Gives an attribute in every call of a step, of thousands of them."""
        if isinstance(self.value, nn.Module):  # it stays: `model_watch.py` sees to that
            return partial(self._table_with(key).get, key, MISSING)
        return partial(self.get, key)

    def put(self, key: str, value: Any) -> None:
        """Sets an attribute, or deletes it for MISSING; no code of the class runs."""
        if value is MISSING:
            self.table.pop(key, None)
        else:
            self._table_with(key)[key] = value

    def _table_with(self, key: str) -> dict[str, Any]:
        """Where an attribute is; among buffers are also those that are some during a capture."""
        buffers = self.table["_buffers"] if isinstance(self.value, nn.Module) else {}
        return buffers if key in buffers else self.table


@dataclass(frozen=True, eq=False)
class ObjectRead(Read):
    """An object whose attributes a step has read: reads of these follow it when it is replaced."""

    held: Held | None = None

    @classmethod
    def of(cls, held: Held, places: Sequence[Callable[[], Any]]) -> Self:
        """For an object that some places hold."""
        return cls(held.name, type(held.value), lambda: [get() for get in places], held=held)

    def change(self) -> Change | None:
        """One if something of another class is there, or different objects where one was."""
        assert self.held is not None, "it was made with one"
        first, *others = self.now()
        kinds = [type(value) for value in (first, *others)]
        if all(other is first for other in others):
            if first is self.held.value and kinds[0] is self.value:
                return None
            if type(first) is self.value and has_attributes(first):
                self.held.value = first
                return None
            return Change(self.name, self.value, kinds[0])
        return Change(f"one object in {self.name} and elsewhere", self.value, kinds)


def held_objects(
    roots: Sequence[tuple[str, Any, Callable[[], Any]]], known: dict[int, Held]
) -> dict[int, Held]:
    """Modules and other objects whose attributes may be read, by the id of their attributes.

    Args:
        roots: name of a place, what is there, and what gives that later.
        known: objects of other captures of the same call, of which reads may be used; gets all.
    """
    for held in known.values():
        held.places.clear()
    found: dict[int, Held] = {}

    def add(name: str, value: Any) -> Held:
        key = id(vars(value))
        held = found[key] = known.setdefault(key, Held(name, value))
        return held

    seen: set[int] = set()
    waiting: list[tuple[str, Any, int, Callable[[], Any], tuple[int, str] | None]]
    waiting = [(name, value, 0, get, None) for name, value, get in roots]

    def add_modules(name: str, value: nn.Module, depth: int) -> None:
        for path, module in value.named_modules(prefix=name):
            if id(vars(module)) not in found:
                add(path, module)
                waiting.append((path, module, depth, lambda: None, None))

    for name, value, _ in roots:  # by their own names, before others hold them
        if isinstance(value, nn.Module):
            add_modules(name, value, 0)
    for name, value, depth, get, place in waiting:  # grows
        if has_attributes(value):
            held = found.get(id(vars(value)))
            if held is not None or (id(value) not in seen and len(seen) <= _MOST_OBJECTS):
                (held or add(name, value)).places.append((get, place))
        if id(value) in seen or len(seen) > _MOST_OBJECTS:
            continue
        if isinstance(value, nn.Module):  # in a container, or an attribute of an object
            add_modules(name, value, depth)
        seen.add(id(value))
        if depth >= _DEPTH:
            continue
        contents = contents_of(value)
        if contents is not None:
            waiting += (
                (f"{name}[{key!r}]", part, depth + 1, partial(_part, get, key), place)
                for key, part in contents.items()
                if _may_hold(part)
            )
        elif is_looked_into(value):
            held, table = found[id(vars(value))], id(vars(value))
            waiting += (
                (f"{name}.{key}", part, depth + 1, partial(held.get, key), (table, key))
                for key, part in own_attributes(value).items()
                if _may_hold(part)
            )
    return found


def contents_of(value: Any) -> dict[Any, Any] | None:
    """What is in a container; None of what is none."""
    is_sequence = isinstance(value, (list, tuple, deque))
    return dict(enumerate(cast(Any, value))) if is_sequence else entries_of(value)


def _part(get: Callable[[], Any], key: Any) -> Any:
    """What is in a container, which may be another one by now."""
    container = get()
    if isinstance(container, (dict, list, tuple)):  # in every call of a step
        try:
            return container[key]
        except (KeyError, IndexError, TypeError):
            return MISSING
    return (contents_of(container) or {}).get(key, MISSING)


def _may_hold(part: Any) -> bool:
    if isinstance(part, nn.Module):
        return True
    if has_attributes(part):
        return is_looked_into(part) or contents_of(part) is not None
    return not isinstance(part, SIMPLE) and contents_of(part) is not None


def own_attributes(value: Any) -> dict[str, Any]:
    """Those of an object, of a module without torch's own."""
    return {key: part for key, part in vars(value).items() if key not in OF_TORCH}


def is_looked_into(value: Any) -> bool:
    """Whether it is of a class of a script or a package with models; objects of torch and here
    change.
    """
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    is_bare = type(value) in (Namespace, types.SimpleNamespace)
    if not (file is None or is_bare or is_model_code(file)):
        return False
    return isinstance(value, nn.Module) or has_attributes(value)


def has_attributes(value: Any) -> bool:
    """Whether it is an object whose attributes are plain to look at: of a class of Python code."""
    kind = type(value)
    if kind is types.SimpleNamespace:
        return True
    is_other = isinstance(value, (type, types.ModuleType, nn.Module, torch.Tensor, *FUNCTIONS))
    is_open = kind.__flags__ & _MADE_BY_PYTHON and not kind.__flags__ & _IMMUTABLE
    if not is_open or is_other or not kind.__dictoffset__:
        return False
    return type(object.__getattribute__(value, "__dict__")) is dict
