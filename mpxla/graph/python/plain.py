"""What can be compared of a value that a step reads: numbers, texts, and containers of them.

A copy is kept, since lists and dictionaries change in place. Tensors count as what they are, not by
their numbers, which programs read anew in every call, and so do modules. What else there is counts
as equal to anything. This module must not know where values come from.
"""

import array
import contextvars
import datetime
import functools
import marshal
import operator
import re
import sys
import threading
import types
import weakref
import zlib
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from torch import nn

from mpxla.env import environment
from mpxla.graph.python.draws import kind_of_generator
from mpxla.graph.python.number import Later, is_number
from mpxla.user_lines import is_model_code

__all__ = [
    "FUNCTIONS",
    "LARGE",
    "MISSING",
    "PLAIN",
    "SIMPLE",
    "UNKNOWN",
    "Change",
    "Read",
    "change",
    "entries_of",
    "plain",
    "refill",
    "slots_of",
]

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
SIMPLE = (bool, int, float, str, types.NoneType)
"""What is its own copy, and can be given back."""
UNKNOWN, LARGE = object(), object()


class _Missing(Enum):
    """Travels between ranks, and stays itself."""

    MISSING = "nothing"

    def __repr__(self) -> str:
        return self.value


MISSING = _Missing.MISSING
"""In the place of an attribute that is not there."""
PLAIN = (
    *(*SIMPLE, complex, bytes, torch.dtype, torch.device, Enum),
    *(np.generic, *FUNCTIONS, type, types.ModuleType, range, slice, Decimal, Fraction),
    *(datetime.date, datetime.time, datetime.timedelta, re.Pattern, PurePath),
)
_THEMSELVES = (torch.Tensor, nn.Module, Later)
_MAPPINGS = (types.MappingProxyType, ChainMap, UserDict, type(environment()))
_GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
_SEQUENCES, _SETS = (list, tuple, deque), (set, frozenset)
_MOST_ELEMENTS = 512
"""Of which each is looked at; of larger containers the bytes are compared."""
_MOST_BYTES = 2**26


@dataclass(frozen=True)
class _Content:
    """An array or a large container."""

    kind: str
    data: bytes

    def __repr__(self) -> str:
        return f"{self.kind} with checksum {zlib.crc32(self.data):08x}"


@dataclass(frozen=True, eq=False)
class _Opaque:
    """An object of which nothing can be seen but which one it is, and whether it equals another."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Opaque):
            return False
        if self.value is other.value:
            return True
        try:
            return bool(self.value == other.value)
        except Exception:  # of what compares by elements
            return False

    def __repr__(self) -> str:
        return repr(self.value)


class Change(NamedTuple):
    """A difference, with the name of the place."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        if isinstance(self.before, _THEMSELVES):
            kind = "tensor" if isinstance(self.before, torch.Tensor) else "module"
            return f"the {kind} {self.name} was replaced"
        shown = (repr(value) for value in (self.before, self.now))
        return "{} changed from {} to {}".format(self.name, *(t[:80] for t in shown))


@dataclass(frozen=True, eq=False)
class Read:
    """A value that a step read.

    Attributes:
        name: for the user.
        value: what it was, as `plain` copies it.
        now: gives what it is.
        names: as for `plain`.
        put: puts a value in its place; None where nothing can.
        whole: gives the container itself, where `now` gives a copy without some of its entries.
    """

    name: str
    value: Any
    now: Callable[[], Any]
    names: Set[str] = frozenset()
    put: Callable[[Any], None] | None = None
    whole: Callable[[], Any] | None = None

    @classmethod
    def at(cls, read: "Read", **more: Any) -> Self:
        """Of the place of another read."""
        return cls(read.name, read.value, read.now, read.names, read.put, **more)

    @property
    def content(self) -> Any:
        """What is in its place."""
        return (self.whole or self.now)()

    def give(self, value: Any) -> None:
        """Puts a value in its place, which must be one that something can be put into."""
        assert self.put is not None, "only such places are given"
        self.put(value)

    def change(self) -> Change | None:
        """How it has changed; None if it is what it was."""
        now = self.now()
        if now is self.value:  # as nearly always
            return None
        return change(self.name, self.value, plain(now, self.names))


def plain(value: Any, names: Set[str] = frozenset()) -> Any:
    """A copy that can be compared; UNKNOWN where there is none, LARGE where it would take too much.

    Args:
        value: anything.
        names: texts in the code that reads it: of a dictionary with some of them as keys, the other
            keys do not count. Scripts keep counters beside their settings.
    """
    if _is_flat(value):
        return value
    count = 0

    def copied(value: Any) -> Any:
        nonlocal count
        count += 1
        if isinstance(value, (*PLAIN, *_THEMSELVES)):
            return value
        if isinstance(value, np.ndarray):
            return _content_of(value)
        drawing = kind_of_generator(value)
        if drawing is not None:  # calls draw by the one that is there
            return drawing
        if isinstance(value, (bytearray, array.array)):
            return _Content(f"a {type(value).__name__} of {len(value)}", bytes(value))
        if isinstance(value, contextvars.ContextVar):  # no number: nothing can take its place
            return _Opaque(copied(cast(Any, value).get(MISSING)))
        if isinstance(value, tuple):  # by a class of its own it may refuse to tell its length
            value = tuple(tuple.__iter__(cast(tuple[Any, ...], value)))
        entries = None if isinstance(value, (*_SEQUENCES, *_SETS)) else entries_of(value)
        if entries is not None and not names.isdisjoint(k for k in entries if isinstance(k, str)):
            entries = {k: v for k, v in entries.items() if not isinstance(k, str) or k in names}
        if entries is None and isinstance(value, _GETTERS):
            value = value.__reduce__()[1]
        elif isinstance(value, functools.partial):
            value = (value.func, value.args, value.keywords)
        held = value if entries is None else entries
        if isinstance(held, (dict, *_SEQUENCES, *_SETS)) and count + len(held) > _MOST_ELEMENTS:
            return _packed(held)
        if isinstance(value, _SETS):
            return frozenset(cast(Set[Any], value))
        if isinstance(value, _SEQUENCES):
            return (tuple if isinstance(value, tuple) else list)(map(copied, value))
        if entries is not None:
            return {key: copied(v) for key, v in entries.items()}
        # Other objects are looked at for their attributes (`held_objects.py`).
        is_open = type(value).__dictoffset__ or isinstance(value, weakref.ReferenceType)
        return UNKNOWN if is_open else _Opaque(value)  # parameters with references cannot move

    return copied(value)


def _content_of(array: np.ndarray) -> Any:
    if array.dtype.hasobject:
        return UNKNOWN
    if array.nbytes > _MOST_BYTES:
        return LARGE
    return _Content(f"a {array.dtype.name} array of shape {list(array.shape)}", array.tobytes())


def _packed(value: Any) -> Any:
    """Of a container of numbers and texts, which takes a tenth of the time of copies."""
    kind = next(k for k in (dict, tuple, list, deque, set, frozenset) if isinstance(value, k))
    bare: Any = list(value) if kind is deque else kind(value)  # no class made from these is taken
    try:
        data = marshal.dumps(bare, 2)  # version 2: later ones write who else holds an object
    except ValueError:  # of other things
        return LARGE
    return (
        _Content(f"a {kind.__name__} of {len(bare)}", data) if len(data) <= _MOST_BYTES else LARGE
    )


def entries_of(value: Any) -> dict[Any, Any] | None:
    """Of dictionaries, and of objects whose attributes nothing else can notice; else None."""
    if isinstance(value, dict):  # no copy: many are looked at in every call of a step
        return cast(dict[Any, Any], value)
    if isinstance(value, _MAPPINGS):
        return dict(cast(Any, value))
    if isinstance(value, UserList):
        return {"data": value.data}
    if isinstance(value, threading.local):  # those of the thread that runs steps
        return vars(value)
    kind = type(value)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_known = hasattr(kind, "__dataclass_fields__") or file is None or is_model_code(file)
    names = slots_of(kind) if is_known and not kind.__dictoffset__ else ()
    return {name: getattr(value, name, None) for name in names} if names else None


@functools.cache
def slots_of(kind: type) -> tuple[str, ...]:
    """Names of the attributes that objects of a class have besides those in a dictionary."""
    own = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return tuple(
        dict.fromkeys(n for slots in own for n in ((slots,) if type(slots) is str else slots))
    )


def _is_flat(value: Any) -> bool:
    """Whether a value cannot change in place: it is plain, or a tuple of what is."""
    if type(value) is tuple:
        return all(isinstance(part, PLAIN) for part in cast(tuple[Any, ...], value))
    return isinstance(value, PLAIN)


def refill(container: Any, content: Any) -> None:
    """Gives a list, a deque, a dictionary or a set what a copy of it holds."""
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(content)


def change(name: str, before: Any, now: Any) -> Change | None:
    """The first difference between two copies; None if there is none.

    Args:
        name: of the place.
        before: what `plain` gave earlier.
        now: what it gives now.
    """
    if before is now or before is UNKNOWN or before is LARGE:
        return None
    if type(before) is not type(now):  # 1, 1.0 and True are equal and make different programs
        return Change(name, before, now)
    if isinstance(before, (tuple, list)) and len(before) == len(now):
        entries = enumerate(cast(list[Any], before))
    elif type(before) is dict and list(cast(Any, before)) == list(now):
        entries = cast(dict[Any, Any], before).items()
    elif type(before) is dict:  # in another order, which loops go by, the same entries are equal
        return Change(name, before, now)
    elif isinstance(before, types.FunctionType):
        return None if _say_the_same(before, now) else Change(name, before, now)
    elif is_number(before) or isinstance(before, _THEMSELVES) or not bool(before == now):
        return Change(name, before, now)
    else:
        return None
    for key, value in entries:
        found = change(f"[{key!r}]", value, now[key]) if value is not now[key] else None
        if found is not None:
            return found._replace(name=f"{name}{found.name}")
    return None


def _say_the_same(one: types.FunctionType, other: types.FunctionType) -> bool:
    """Functions are often made anew."""
    if one.__code__ is not other.__code__ and one.__code__ != other.__code__:
        return False
    try:
        held, others = (
            [f.__defaults__, f.__kwdefaults__, *(c.cell_contents for c in f.__closure__ or ())]
            for f in (one, other)
        )
    except ValueError:  # one is not assigned
        return False
    pairs = zip(held, others, strict=True)
    return one.__globals__ is other.__globals__ and all(
        a is b or bool(_is_flat(a) and a == b) for a, b in pairs
    )
