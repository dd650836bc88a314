"""Names that a step function makes outside of its objects while it runs.

Globals (`global count`), and attributes of classes and functions that were not there: `Layer.count
= getattr(Layer, "count", 0) + 1`. Nobody can say beforehand which of the names in its code these
are. A capture that finds one takes it away, and the next one knows of the place.

This module must not know what is done with places.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from mpxla.graph.python.plain import FUNCTIONS, MISSING
from mpxla.graph.python.reach import Outside, Place
from mpxla.graph.user_code import AgainError

__all__ = ["NewNames"]

_NO_STATE = (type, ModuleType, nn.Module, *FUNCTIONS)
_Owner = type | Callable[..., Any] | dict[str, Any]


class NewNames:
    """Watches classes, functions and tables of globals for one run of a function.

    Args:
        outside: what it reaches; gets the places that are not there now.
        known: places that earlier captures have found; gets those that are found.
    """

    def __init__(self, outside: Outside, known: list[Place]):
        tables = outside.owners.values()
        self._before = [(text, owner, set(_table(owner))) for text, owner in tables]
        owners, names = {place.owner for place in known}, {place.name for place in known}
        others = (p for p in outside.places if p.owner not in owners and p.name not in names)
        outside.places = [*others, *(replace(place, value=place.get()) for place in known)]
        self._known = known

    def check(self) -> None:
        """Looks for new names, when the function has run.

        Raises:
            AgainError: there are some; they are gone again.
        """
        places = {place.owner for place in self._known}
        found: list[Place] = []
        for text, owner, before in self._before:
            names = [n for n, v in _table(owner).items() if n not in before and _is_state(n, v)]
            found += (_place(text, owner, n) for n in names if (id(owner), n) not in places)
        for place in found:
            assert place.put is not None, "names can be taken away"
            place.put(MISSING)
        if found:
            raise AgainError([place.name for place in found], partial(self._known.extend, found))


def _table(owner: _Owner) -> Mapping[str, Any]:
    return owner if isinstance(owner, dict) else vars(owner)


def _is_state(name: str, value: Any) -> bool:
    """Whether it is nothing of Python's own, and nothing that is imported or defined."""
    return not name.startswith("__") and not isinstance(value, _NO_STATE)


def _place(text: str, owner: _Owner, name: str) -> Place:
    put = partial(_put, owner, name)
    return Place(
        f"{text}{name}", MISSING, lambda: _table(owner).get(name, MISSING), put, (id(owner), name)
    )


def _put(owner: _Owner, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        if value is MISSING:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif value is not MISSING:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)
