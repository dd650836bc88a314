"""Modules of torch that look different from the script's code than from anywhere else.

The class of a module object is exchanged for one that looks at who reads an attribute. Libraries
read what is there; the script reads a replacement, or gets an error that names its line. The module
object, and what libraries hold of it, stay the same.
"""

import contextlib
import sys
from collections.abc import Callable, Generator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from mpxla.compat import CompatError
from mpxla.user_lines import at_script_line, is_script_code

__all__ = ["View", "show"]


class View(NamedTuple):
    """What the script sees of one module."""

    replacements: Mapping[str, Any]
    """Name -> what the script reads under it."""
    refuse: Callable[[str], str] | None = None
    """Why any other name cannot be mapped; None if other names are as they are."""
    shared: frozenset[str] = frozenset()
    """Names whose replacement everybody reads."""


_views: dict[str, View] = {}


class _Viewed(ModuleType):
    """A module with a view."""

    def __getattribute__(self, name: str) -> Any:
        real = super().__getattribute__
        if name.startswith("__"):
            return real(name)
        module = real("__name__")
        view = _views[module]
        reader = sys._getframe(1).f_code.co_filename  # pyright: ignore[reportPrivateUsage]
        if name not in view.shared and not is_script_code(reader):
            return real(name)
        if name in view.replacements:
            return view.replacements[name]
        found = real(name)  # AttributeError for what does not exist at all
        if view.refuse is None:
            return found
        raise CompatError(
            f"{at_script_line()}: {module}.{name} cannot be mapped onto an XLA device: "
            f"{view.refuse(name)}."
        )


@contextlib.contextmanager
def show(module: ModuleType, view: View) -> Generator[None]:
    """Gives a module a view until exit."""
    name, before = module.__name__, module.__class__
    _views[name] = view
    module.__class__ = _Viewed
    try:
        yield
    finally:
        module.__class__ = before
        del _views[name]
