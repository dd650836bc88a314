"""What a function reaches from outside its arguments, and how to put something else there.

Its closure, the globals that it names, the attributes of objects of these, and the attributes of a
model's modules. This module must not know what is looked for.
"""

import dis
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["Place", "direct_places", "places"]


@dataclass(frozen=True)
class Place:
    """A name with a value.

    Attributes:
        name: for the user.
        value: what was there when it was found.
        get: gives what is there.
        put: puts another value there.
    """

    name: str
    value: Any
    get: Callable[[], Any]
    put: Callable[[Any], None]


def places(function: Callable[..., Any], model: nn.Module) -> list[Place]:
    """Everything that a function, method or partial and the modules of a model reach at once."""
    direct = direct_places(function)
    inside = [part for place in direct for part in _attributes(place.name, place.value)]
    for path, module in model.named_modules():
        inside += _of_table(f"model.{path}" if path else "model", vars(module))
    return [*direct, *inside]


def direct_places(function: Callable[..., Any]) -> list[Place]:
    """The closure and the globals of a function and of the user's functions among them."""
    return list(_of_function(function, set()))


def _of_function(function: Any, seen: set[int]) -> Iterator[Place]:
    """Closure and globals of a function, and of the functions among them."""
    while not isinstance(function, FunctionType):
        owner = getattr(function, "__self__", None)
        if owner is not None:
            yield from _attributes("self", owner)
        inner = getattr(function, "func", None) or getattr(function, "__func__", None)
        if inner is None:
            return
        function = inner
    if id(function) in seen:
        return
    seen.add(id(function))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = [_of_cell(name, cell) for name, cell in cells if _is_assigned(cell)]
    table = function.__globals__
    found += [_of_key(name, table, name) for name in set(_names(function.__code__)) & {*table}]
    for place in found:
        is_own = isinstance(place.value, FunctionType) and (
            place.value.__globals__ is table or place in found[: len(function.__closure__ or ())]
        )
        if is_own:
            yield from _of_function(place.value, seen)
        else:
            yield place


def _names(code: CodeType) -> Iterator[str]:
    """Global names that a function and those inside it use."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_assigned(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _of_cell(name: str, cell: CellType) -> Place:
    def put(new: Any) -> None:
        cell.cell_contents = new

    return Place(name, cell.cell_contents, lambda: cell.cell_contents, put)


def _of_key(name: str, table: dict[str, Any], key: str) -> Place:
    return Place(name, table[key], lambda: table.get(key), lambda new: table.update({key: new}))


def _of_table(name: str, table: dict[str, Any]) -> list[Place]:
    return [_of_key(f"{name}.{key}", table, key) for key in table]


def _attributes(name: str, value: Any) -> list[Place]:
    """The attributes of an object whose class is not one of Python's."""
    own = getattr(value, "__dict__", None)
    is_other = isinstance(value, (type, ModuleType, nn.Module, torch.Tensor))
    is_pythons = type(value).__module__.partition(".")[0] in sys.stdlib_module_names
    if type(own) is not dict or is_other or (is_pythons and type(value).__module__ != "__main__"):
        return []
    return _of_table(name, own)
