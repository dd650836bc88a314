"""Copies of what lists and dictionaries hold, so that it can be put back into them.

This module must not know whose they are.
"""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from mpxla.graph.python.plain import MISSING, SIMPLE, refill

__all__ = [
    "CONTAINERS",
    "PLAIN_CONTAINERS",
    "held_before",
    "is_simple",
    "left_again",
    "note_content",
]

CONTAINERS = (list, dict, deque)
PLAIN_CONTAINERS = (*CONTAINERS, OrderedDict, defaultdict, Counter)
"""Those that only hold what was put there."""
_MOST_OBJECTS = 2000
"""In a container that is looked into."""


def is_simple(value: Any) -> bool:
    """Whether it can be given back: no container, which may have changed in place."""
    return value is MISSING or isinstance(value, SIMPLE)


def left_again(put: Callable[[Any], None], value: Any) -> Callable[[], None]:
    """Puts back what a capture has left, as it was then: the next one adds to it."""
    contents: list[tuple[Any, Any]] = []
    note_content(value, contents)

    def leave() -> None:
        for container, content in contents:
            refill(container, content)
        put(value)

    return leave


def held_before(value: Any, contents: Mapping[int, Any]) -> Any:
    """What a container held, and those in it, by the ids of these."""
    content = contents.get(id(value))
    if isinstance(content, dict):
        return {key: held_before(part, contents) for key, part in content.items()}
    if content is None:
        return value
    parts = [held_before(part, contents) for part in content]
    return parts if isinstance(content, list) else deque(parts, content.maxlen)


_OF_NAMESPACES = {"__name__", "__loader__", "__spec__"}


def note_content(container: Any, contents: list[tuple[Any, Any]]) -> None:
    """Adds a container with what it holds, and the containers in it.

    Not the names of a module (`losses.__dict__[kind]`): they are emptied for no moment, not even
    Python's own, which are among those of every module; and what is imported meanwhile stays.
    """
    seen, waiting = {id(known) for known, _ in contents}, [container]
    for value in waiting:  # grows
        if type(value) not in PLAIN_CONTAINERS or id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, dict) or not value.keys() >= _OF_NAMESPACES:
            contents.append((value, copy.copy(value)))
        if len(value) <= _MOST_OBJECTS:
            waiting += value.values() if isinstance(value, dict) else value
