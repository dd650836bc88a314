"""Attributes, mostly of what other packages have, and tables, that are others for a while."""

import contextlib
from collections.abc import Generator
from typing import Any

__all__ = ["exchanged", "restored"]

_NONE = object()


@contextlib.contextmanager
def exchanged(owner: Any, **values: Any) -> Generator[None]:
    """Puts other values in the place of attributes of a class, module or object; undone on exit."""
    before = {name: vars(owner).get(name, _NONE) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _NONE:
                delattr(owner, name)  # inherited
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def restored(*tables: dict[Any, Any]) -> Generator[None]:
    """Gives dictionaries back on exit what they hold now."""
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            for key in table.keys() - entries.keys():
                del table[key]
            if list(table) != list(entries):  # never empty for other threads, if that can be
                table.clear()
            table.update(entries)
