"""Replaces attributes of modules, perhaps when the script imports them, and puts them back."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from types import ModuleType
from typing import Any

from mpxla.graph.exchanged import exchanged

__all__ = ["Patches", "patched_on_import"]


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
