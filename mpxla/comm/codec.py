"""Data between ranks: a closed set of types as JSON, and the elements of tensors behind it.

What mpxla itself exchanges travels like this, so that reading a message runs no code, whatever is
in it. The user's objects are another matter (`objects`); where they may sit inside the library's
own (the state of an optimizer), they travel as pickled leaves of messages that say so.

    | size of the JSON text, 8 bytes | JSON text | zeros | elements | zeros | elements ...

None, bool, int, float, str and list are themselves in JSON. All else is an object of one key, which
names the type: {"tuple": [1, 2]}, {"dict": [["key", "value"]]}, {"tensor": ["float32", [2, 3],
position, ...]}. Elements start at multiples of 64. Types of mpxla join by `register`. Enums are
looked up among the modules that the receiver has imported, and nothing is imported for a message.

This file must not know who exchanges what.
"""

import dataclasses
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from mpxla import errors
from mpxla.comm.objects import Format, pickled, unpickled
from mpxla.comm.packing import ALIGNMENT_BYTES, as_bytes, as_memory
from mpxla.errors import MpxlaError

__all__ = ["DATA", "STATE", "can_travel", "find_class", "register"]

_SIZE_BYTES = 8
_T = TypeVar("_T")
_registered: dict[str, type] = {}
_NUMPY_KINDS = "biufcSUmM"


def register(kind: type[_T]) -> type[_T]:
    """Lets a class of mpxla travel, by its fields. For frozen dataclasses and named tuples."""
    name = kind.__qualname__
    assert _registered.get(name, kind) is kind, f"two classes {name} travel"
    has_fields = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    assert has_fields, f"{name} has no fields"
    _registered[name] = kind
    return kind


def can_travel(value: Any) -> bool:
    """Whether a value is data that `DATA` can carry."""
    try:
        _Writer(with_objects=False).tree(value)
    except (_UnknownType, ValueError, RecursionError):
        return False
    return True


def find_class(module: str, qualname: str) -> type | None:
    """A class of a module that is imported here already."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    is_it = isinstance(found, type) and (found.__module__, found.__qualname__) == (module, qualname)
    return found if is_it else None


class _UnknownType(TypeError):  # noqa: N818 - always caught here
    """A value that is no data; collects where it is on the way up."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
        self.path = ""


class _Writer:
    """Makes the JSON tree of one message, and collects what goes behind it."""

    def __init__(self, *, with_objects: bool) -> None:
        self.blobs: list[tuple[int, torch.Tensor]] = []
        self.end = 0
        self._with_objects = with_objects

    def tree(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return self.items(value)
        if (write := _WRITERS.get(kind)) is not None:
            return {write[0]: write[1](self, value)}
        names = [kind.__module__, kind.__qualname__]
        if isinstance(value, Enum) and find_class(*names) is kind:
            return {"enum": [*names, value.name, self.tree(value.value)]}
        if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in _NUMPY_KINDS:
            elements = self.blob(torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy()))
            return {"numpy": [value.dtype.str, list(value.shape), kind is np.ndarray, *elements]}
        if _registered.get(kind.__qualname__) is kind:
            return {"mpxla": [kind.__qualname__, self.items(_values(value))]}
        if isinstance(value, type) and issubclass(value, MpxlaError):
            return {"error": next(base.__name__ for base in value.__mro__ if _is_public(base))}
        if self._with_objects:
            return {"object": self.blob(torch.frombuffer(pickled(value), dtype=torch.uint8))}
        raise _UnknownType(value)

    def items(self, values: Iterable[Any]) -> list[Any]:
        return [self._item(value, index) for index, value in enumerate(values)]

    def _item(self, value: Any, key: Any) -> Any:
        try:
            return self.tree(value)
        except _UnknownType as error:
            error.path = f"[{key!r}]{error.path}"
            raise

    def pairs(self, value: Any) -> list[Any]:
        return [[self._item(key, key), self._item(item, key)] for key, item in value.items()]

    def blob(self, data: torch.Tensor) -> list[int]:
        """Position and size of bytes that go behind the text."""
        start = -(-self.end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.blobs.append((start, data))
        self.end = start + data.numel()
        return [start, data.numel()]

    def bytes(self, value: bytes) -> list[int]:
        return self.blob(
            torch.frombuffer(bytearray(value or b"\0"), dtype=torch.uint8)[: len(value)]
        )

    def tensor(self, value: torch.Tensor) -> list[Any]:
        if value.layout is not torch.strided or value.is_quantized or value.__dict__:
            if self._with_objects:
                return ["", *self.blob(torch.frombuffer(pickled(value), dtype=torch.uint8))]
            raise _UnknownType(value)
        elements = self.blob(as_bytes(value.detach().cpu()))
        is_parameter = type(value) is torch.nn.Parameter
        facts = [list(value.shape), value.requires_grad, is_parameter]
        return [str(value.dtype).removeprefix("torch."), *elements, *facts]


_WRITERS: dict[type, tuple[str, Callable[[_Writer, Any], Any]]] = {
    tuple: ("tuple", _Writer.items),
    set: ("set", _Writer.items),
    frozenset: ("frozenset", _Writer.items),
    torch.Size: ("size", lambda writer, value: list(value)),
    dict: ("dict", _Writer.pairs),
    OrderedDict: ("ordered", _Writer.pairs),
    bytes: ("bytes", _Writer.bytes),
    complex: ("complex", lambda writer, value: [value.real, value.imag]),
    Fraction: ("fraction", lambda writer, value: str(value)),
    Decimal: ("decimal", lambda writer, value: str(value)),
    torch.dtype: ("dtype", lambda writer, value: str(value).removeprefix("torch.")),
    torch.device: ("device", lambda writer, value: str(value)),
    torch.Tensor: ("tensor", _Writer.tensor),
    torch.nn.Parameter: ("tensor", _Writer.tensor),
}


class _Reader:
    """Makes the value of one message out of its parts."""

    def __init__(self, blobs: torch.Tensor, *, with_objects: bool) -> None:
        self._blobs = blobs
        self._with_objects = with_objects

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        return _READERS[kind](self, content)

    def pairs(self, content: Any) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(item)) for key, item in content]

    def blob(self, start: int, size: int) -> torch.Tensor:
        if not 0 <= start <= start + size <= self._blobs.numel():
            raise ValueError("it is shorter than it says")
        return self._blobs[start : start + size]

    def bytes(self, content: Any) -> bytes:
        return bytes(as_memory(self.blob(*content)))

    def tensor(self, content: Any) -> torch.Tensor:
        name, start, size, *facts = content
        if not name:
            return self.object([start, size])
        shape, requires_grad, is_parameter = facts
        dtype = _dtype(name)
        if size != math.prod(shape) * dtype.itemsize:
            raise ValueError("a tensor of another size than its shape")
        # A copy of its own: the message goes, and its elements may start anywhere.
        tensor = self.blob(start, size).clone().view(dtype).view(shape)
        if is_parameter:
            return torch.nn.Parameter(tensor, requires_grad)
        return tensor.requires_grad_(requires_grad)

    def numpy(self, content: Any) -> Any:
        name, shape, is_array, start, size = content
        dtype = np.dtype(name)
        if dtype.kind not in _NUMPY_KINDS:
            raise ValueError(f"numpy values of type {name}")
        array = np.frombuffer(self.bytes([start, size]), dtype).reshape(shape)
        return array.copy() if is_array else array[()]

    def enum(self, content: Any) -> Any:
        module, qualname, name, value = content
        kind = find_class(module, qualname)
        if kind is None or not issubclass(kind, Enum):
            raise ValueError(f"no Enum {qualname} in the imported module {module}")
        if name in kind.__members__:
            return kind.__members__[name]
        return kind(self.value(value))  # flags that are set together have no name of their own

    def own(self, content: Any) -> Any:
        name, values = content
        return _registered[name](*[self.value(value) for value in values])

    def error(self, name: str) -> type:
        found = getattr(errors, name)
        if not _is_public(found):
            raise ValueError(f"no error {name}")
        return found

    def object(self, content: Any) -> Any:
        if not self._with_objects:
            raise ValueError("an object where only data may come")
        return unpickled(self.blob(*content))


_READERS: dict[str, Callable[[_Reader, Any], Any]] = {
    "tuple": lambda reader, content: tuple(reader.value(content)),
    "set": lambda reader, content: set(reader.value(content)),
    "frozenset": lambda reader, content: frozenset(reader.value(content)),
    "size": lambda reader, content: torch.Size(content),
    "dict": lambda reader, content: dict(reader.pairs(content)),
    "ordered": lambda reader, content: OrderedDict(reader.pairs(content)),
    "bytes": _Reader.bytes,
    "complex": lambda reader, content: complex(*content),
    "fraction": lambda reader, content: Fraction(content),
    "decimal": lambda reader, content: Decimal(content),
    "dtype": lambda reader, content: _dtype(content),
    "device": lambda reader, content: torch.device(content),
    "tensor": _Reader.tensor,
    "numpy": _Reader.numpy,
    "enum": _Reader.enum,
    "mpxla": _Reader.own,
    "error": _Reader.error,
    "object": _Reader.object,
}


def _values(value: Any) -> Sequence[Any]:
    if isinstance(value, tuple):
        return value
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def _is_public(kind: Any) -> bool:
    name = getattr(kind, "__name__", "")
    return name in errors.__all__ and getattr(errors, name) is kind


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {name}")
    return found


def _dump(obj: Any, purpose: str, *, with_objects: bool) -> torch.Tensor:
    """Makes the bytes of a value: flat uint8 host tensor [num_bytes].

    Raises:
        MpxlaError: Some part is no data; the text names it.
    """
    writer = _Writer(with_objects=with_objects)
    try:
        text = json.dumps(writer.tree(obj), separators=(",", ":")).encode()
    except _UnknownType as error:
        raise MpxlaError(
            f"{purpose}: obj{error.path} is of type {type(error.value).__qualname__}, which does "
            f"not travel between ranks here. Use numbers, strings, tensors, and containers of them."
        ) from error
    head = -(-(_SIZE_BYTES + len(text)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    message = torch.zeros(head + writer.end, dtype=torch.uint8)
    prefix = len(text).to_bytes(_SIZE_BYTES, "little") + text
    message[: len(prefix)] = torch.frombuffer(bytearray(prefix), dtype=torch.uint8)
    for start, data in writer.blobs:
        message[head + start : head + start + data.numel()] = data
    return message


def _restore(data: torch.Tensor, src: int, rank: int, *, with_objects: bool) -> Any:
    """Reads a value; the inverse of `_dump`.

    Raises:
        MpxlaError: It is none, or has a part that is not known here.
    """
    try:
        size = int.from_bytes(bytes(as_memory(data[:_SIZE_BYTES])), "little")
        end = _SIZE_BYTES + size
        tree = json.loads(bytes(as_memory(data[_SIZE_BYTES:end])))
        head = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return _Reader(data[head:], with_objects=with_objects).value(tree)
    except Exception as error:  # whatever may be wrong with what somebody else has made
        raise MpxlaError(
            f"rank {rank} cannot read a message of rank {src} ({type(error).__name__}: {error}). "
            f"Run the same version of mpxla and the same script on all ranks, and import what the "
            f"arguments are made of on all of them."
        ) from error


DATA = Format("data", partial(_dump, with_objects=False), partial(_restore, with_objects=False))
"""What mpxla says to itself."""
STATE = Format("state", partial(_dump, with_objects=True), partial(_restore, with_objects=True))
"""States of models and optimizers: data, in which the user's objects may be leaves."""
