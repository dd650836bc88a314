"""Whether two objects mean the same to a program that was captured with one of them.

A step function, and every module or namespace among its arguments, is part of the program. Scripts
make them anew (a function decorated in every epoch, `functools.partial`), so identity is too much
to ask; the name or the type is too little.
This module must not know what the objects are used for.
"""

import functools
from collections.abc import Collection
from types import CellType, FunctionType, MethodType
from typing import Any

__all__ = ["Identities", "is_same"]


class Identities:
    """Numbers objects: those that mean the same have the same number."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}
        self._count = 0

    def number(self, value: Any) -> int:
        """The number of an object; a new one is kept, so that its number stays its own."""
        for number, known in self._known.items():
            if is_same(known, value):
                return number
        self._known[self._count] = value
        self._count += 1
        return self._count - 1

    def numbers(self) -> list[int]:
        """The numbers of all known objects."""
        return list(self._known)

    def keep(self, numbers: Collection[int]) -> None:
        """Forgets all objects but these; their numbers are not given again."""
        self._known = {n: value for n, value in self._known.items() if n in numbers}


def is_same(a: Any, b: Any, assumed: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether the objects are one, are functions that say the same, or compare as equal.

    `assumed` are pairs under comparison, which a function that refers to itself meets again.
    """
    pair = (id(a), id(b))
    if a is b or pair in assumed:
        return True
    if type(a) is not type(b):
        return False
    assumed |= {pair}
    if isinstance(a, FunctionType):
        return (
            a.__code__ == b.__code__
            and a.__globals__ is b.__globals__
            and all(is_same(x, y, assumed) for x, y in zip(_captured(a), _captured(b), strict=True))
        )
    if isinstance(a, MethodType):
        return is_same(a.__func__, b.__func__, assumed) and a.__self__ is b.__self__
    if isinstance(a, functools.partial):
        return all(is_same(x, y, assumed) for x, y in zip(_parts(a), _parts(b), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_same(x, y, assumed) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[key], b[key], assumed) for key in a)
    try:
        return (a == b) is True
    except (RuntimeError, TypeError, ValueError):  # comparing arrays and tensors inside
        return False


def _captured(function: FunctionType) -> list[Any]:
    """What a function has besides its code."""
    cells = [_content(cell) for cell in function.__closure__ or ()]
    return [function.__defaults__, function.__kwdefaults__, cells]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return CellType


def _parts(value: "functools.partial[Any]") -> tuple[Any, ...]:
    return value.func, value.args, value.keywords
