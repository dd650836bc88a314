"""Finds the entry of a nested value that makes trouble in a checkpoint, by the user's spelling."""

import argparse
import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mpxla.checkpoint.plain_data import safe_classes

__all__ = ["Entry", "find_unpicklable", "find_unsafe", "unsafe_names"]

Entry = tuple[str, Any]
"""How the user would write it, as in `user_content['args'].lr`, and what is there."""


def unsafe_names(data: bytes) -> list[str]:
    """Dotted paths of what a file holds and is loaded with `weights_only=False` alone.

    Args:
        data: what `torch.save` wrote.
    """
    names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    return safe_classes(names)[1]


def find_unsafe(value: Any, what: str) -> Entry:
    """The innermost entry that loading refuses."""
    return _innermost(what, value, lambda part: bool(unsafe_names(_saved(part))))


def find_unpicklable(value: Any, what: str) -> Entry:
    """The innermost entry that cannot be saved."""

    def fails(part: Any) -> bool:
        try:
            _saved(part)
        except (pickle.PicklingError, TypeError, AttributeError):
            return True
        return False

    return _innermost(what, value, fails)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _innermost(path: str, value: Any, is_bad: Callable[[Any], bool]) -> Entry:
    seen: set[int] = set()
    found = path, value
    while id(found[1]) not in seen:
        seen.add(id(found[1]))
        found = next((part for part in _parts(*found) if is_bad(part[1])), found)
    return found


def _parts(path: str, value: Any) -> Iterator[Entry]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"{path}[{key!r}]", part
    elif isinstance(value, list | tuple | set | frozenset):
        for index, part in enumerate(value):
            yield f"{path}[{index}]", part
    elif isinstance(value, argparse.Namespace) or dataclasses.is_dataclass(value):
        for name, part in vars(value).items() if hasattr(value, "__dict__") else ():
            yield f"{path}.{name}", part
