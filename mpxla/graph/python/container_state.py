"""Plain values in lists and dictionaries that a step function reads: what has changed in them.

This module must not know how captures are judged.
"""

import ast
import contextlib
from collections.abc import Collection
from typing import Any

import torch

from mpxla.graph.python.noted_contents import CONTAINERS, PLAIN_CONTAINERS, is_simple
from mpxla.graph.python.outside_reads import without_counted
from mpxla.graph.python.plain import MISSING, Read, change, plain

__all__ = [
    "changed_entries",
    "entry",
    "has_no_others",
    "is_as_left",
    "missing_entries",
    "tensor_entries",
]


def changed_entries(read: Read, names: Collection[str] | None) -> list[Read]:
    """Plain values of a container, and of those in it, that have changed, or have such names; for
    None all.
    """
    before, now = read.value, read.now()
    if type(now) not in PLAIN_CONTAINERS or not isinstance(before, (dict, list)):
        return []
    if isinstance(before, list):
        if len(before) != len(now):
            return []
        before = dict(enumerate(before))
    else:
        shown = plain(now, read.names)
        before = {**dict.fromkeys(shown, MISSING), **before} if isinstance(shown, dict) else {}
    found: list[Read] = []
    for key, value in before.items():
        part = entry(read, key, value)
        last = part.now()
        if isinstance(value, (dict, list)):
            found += changed_entries(part, names)
        elif is_simple(value) and is_simple(last):
            is_meant = names is None or part.name in names
            found += [part] if is_meant or change("", value, last) else []
    return found


def tensor_entries(read: Read) -> list[Read]:
    """Tensors in a container, and in those in it."""
    held, found = read.content, list[Read]()
    if type(held) not in PLAIN_CONTAINERS:
        return found
    for key, value in held.items() if isinstance(held, dict) else enumerate(held):
        part = entry(read, key, value)
        found += [part] if isinstance(value, torch.Tensor) else tensor_entries(part)
    return found


def missing_entries(read: Read, names: Collection[str]) -> list[Read]:
    """Entries with some names that a dictionary does not have yet."""
    if not isinstance(read.value, dict):
        return []
    keys = [name[len(read.name) + 1 : -1] for name in names if name.startswith(f"{read.name}[")]
    found: list[Read] = []
    for key in keys:
        with contextlib.suppress(ValueError, SyntaxError):  # of one in another container
            found.append(entry(read, ast.literal_eval(key), MISSING))
    return [one for one in found if one.now() is MISSING]


def has_no_others(container: Read, entries: Collection[str]) -> bool:
    """Whether some of these names are of a container, in which nothing else has changed."""
    own = {name for name in entries if name.startswith(f"{container.name}[")}
    return bool(own) and without_counted(container, own).change() is None


def entry(read: Read, key: Any, value: Any) -> Read:
    """What is in a container."""

    def now() -> Any:
        held = read.content
        if isinstance(held, dict):
            return held.get(key, MISSING)
        return held[key] if isinstance(held, CONTAINERS) and key < len(held) else MISSING

    def put(new: Any) -> None:
        if new is MISSING:
            read.content.pop(key, None)
        else:
            read.content[key] = new

    return Read(f"{read.name}[{key!r}]", value, now, read.names, put)


def is_as_left(pair: tuple[Any, Any]) -> bool:
    """Whether a container holds the same objects as a copy of it."""
    ids: list[list[int]] = []
    for held in pair:
        parts = [*held, *held.values()] if isinstance(held, dict) else held
        ids.append([id(part) for part in parts])
    return ids[0] == ids[1]
