"""Hooks and parts that a step gives modules while it is captured.

A flag often says that they are there, so that they are registered once (transformers does so to
collect hidden states). Captures set flags back: without what goes with them, the next capture would
register hooks once more, and collect everything twice.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from mpxla.graph.python.plain import refill

__all__ = ["MODULE_TABLES", "ModuleTables"]

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
"""Where modules have their tensors and parts, besides their attributes."""

_Table = dict[Any, Any]


class ModuleTables:
    """The tables of hooks and of parts of some modules, with what they hold now."""

    def __init__(self, modules: Iterable[nn.Module]):
        named = (pair for module in modules for pair in vars(module).items())
        tables = (table for name, table in named if "_hooks" in name or name == "_modules")
        self._before = [(table, dict(table)) for table in tables if isinstance(table, dict)]

    def left(self) -> list[Callable[[], None]]:
        """Put back what they hold now."""
        return [partial(refill, table, dict(table)) for table, _ in self._changed()]

    def restore(self) -> None:
        """Gives them what they held before."""
        for table, before in self._changed():
            refill(table, before)

    def _changed(self) -> list[tuple[_Table, _Table]]:
        return [(now, before) for now, before in self._before if _entries(now) != _entries(before)]


def _entries(table: _Table) -> list[tuple[Any, int]]:
    return [(key, id(value)) for key, value in table.items()]
