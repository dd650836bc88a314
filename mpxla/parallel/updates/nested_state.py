"""The state of a parameter as one flat dictionary, where its optimizer nests it.

SOAP keeps lists of matrices, AggMo a dictionary of buffers. The flat form has a key for every
value, which says the way to it: `Q[0]`, `buffers{0.9}`, `pair(1)`. Checkpoints have these keys.
"""

import ast
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote

__all__ = ["flattened", "mapped", "restored"]

_STEP = re.compile(r"\[(.*?)\]|\((.*?)\)|\{(.*?)\}")
_KINDS: tuple[type, ...] = (list, tuple, dict)
_FORMS = ("[{}]", "({})", "{{{}}}")
_DICTIONARIES = (dict, OrderedDict, defaultdict)
_SPECIAL = "[](){}%"


def flattened(state: Mapping[Any, Any]) -> dict[str, Any]:
    """A value for every key that leads to one; an empty container is None."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        start = _quoted(key) if isinstance(key, str) else _FORMS[2].format(_quoted(repr(key)))
        _add(found, start, value)
    return found


def restored(flat: Mapping[str, Any]) -> dict[Any, Any]:
    """The state that `flattened` was given."""
    root: dict[Any, Any] = {}
    for path, value in flat.items():
        start = path.partition("[")[0].partition("(")[0].partition("{")[0]
        place, key = root, unquote(start)
        steps = list(_STEP.finditer(path, len(start)))
        if not start:
            first = steps.pop(0)
            key = ast.literal_eval(unquote(first[3]))
        for step in steps:
            number = step.lastindex or 0
            place = place.setdefault(key, _Nest(_KINDS[number - 1]))
            if not step[number]:  # of an empty one
                break
            key = ast.literal_eval(unquote(step[number]))
        else:
            place[key] = value
    return {key: _settled(value) for key, value in root.items()}


def mapped(change: Callable[[Any], Any], state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state with other values in the same places."""
    return restored({key: change(value) for key, value in flattened(state).items()})


class _Nest(dict[Any, Any]):
    """A container that is being restored, as a dictionary; and what it is to be."""

    def __init__(self, kind: type):
        super().__init__()
        self.kind = kind


def _settled(value: Any) -> Any:
    if not isinstance(value, _Nest):
        return value
    parts = {key: _settled(part) for key, part in value.items()}
    return parts if value.kind is dict else value.kind(parts[i] for i in range(len(parts)))


def _add(found: dict[str, Any], path: str, value: Any) -> None:
    if type(value) in _DICTIONARIES and all(map(_is_plain, value)):
        form, parts = _FORMS[2], dict(value)
    elif type(value) in (list, tuple):
        form, parts = _FORMS[_KINDS.index(type(value))], dict(enumerate(value))
    else:
        found[path] = value
        return
    if not parts:
        found[path + form.format("")] = None
    for key, part in parts.items():
        _add(found, path + form.format(_quoted(repr(key))), part)


def _is_plain(key: Any) -> bool:
    """Whether a key can be read back from a text."""
    try:
        return ast.literal_eval(repr(key)) == key
    except (ValueError, SyntaxError):
        return False


def _quoted(text: str) -> str:
    return quote(text, safe=" ") if any(character in text for character in _SPECIAL) else text
