"""Replaces attributes of modules, for everybody or for the script's code alone, until exit."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from mpxla.compat import CompatError
from mpxla.graph.exchanged import exchanged
from mpxla.user_lines import at_script_line, is_script_code

__all__ = ["Patches", "View", "patched_on_import", "show"]


class Patches(contextlib.ExitStack):
    """Attributes that are replaced until its block ends; what they were comes back, last first."""

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Replaces an attribute of a module or a class, and returns what it was."""
        found = getattr(owner, name, None)
        self.enter_context(exchanged(owner, **{name: value}))
        return found


Patcher = Callable[[ModuleType, Patches], None]


@contextlib.contextmanager
def patched_on_import(patchers: Mapping[str, Patcher]) -> Generator[None]:
    """Calls the patcher of each module when that has been imported; undone on exit."""
    with Patches() as patches:
        for name, patch in patchers.items():
            if name in sys.modules:
                patch(sys.modules[name], patches)
        finder = _Finder(patchers, patches)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and has them patched after they have run."""

    def __init__(self, patchers: Mapping[str, Patcher], patches: Patches):
        self._patchers = patchers
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._patchers.get(fullname)
        spec = patch and importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if not patch or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            patch(module, self._patches)

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


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
    """A module with a view, which looks at who reads an attribute.

    Libraries read what is there; the script reads a replacement, or gets an error that names its
    line. The module object, and what libraries hold of it, stay the same.
    """

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
