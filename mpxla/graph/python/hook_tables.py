"""Hooks that a step gives modules while it is captured.

A flag often says that they are there, so that they are registered once (transformers does so to
collect hidden states). Captures set flags back: without their hooks, the next capture would
register these once more, and collect everything twice.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

__all__ = ["HookTables"]

_Table = dict[Any, Any]


class HookTables:
    """The tables of hooks of some modules, with what they hold now."""

    def __init__(self, modules: Iterable[nn.Module]):
        tables = (v for m in modules for k, v in vars(m).items() if "_hooks" in k)
        self._before = [(table, dict(table)) for table in tables if isinstance(table, dict)]

    def left(self) -> list[Callable[[], None]]:
        """Put back what they hold now."""
        return [partial(_refill, table, dict(table)) for table, _ in self._changed()]

    def restore(self) -> None:
        """Gives them what they held before."""
        for table, before in self._changed():
            _refill(table, before)

    def _changed(self) -> list[tuple[_Table, _Table]]:
        return [(table, before) for table, before in self._before if [*table] != [*before]]


def _refill(table: _Table, content: _Table) -> None:
    table.clear()
    table.update(content)
