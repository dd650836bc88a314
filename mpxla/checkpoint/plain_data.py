"""Objects that travel in checkpoints as data, and the entry of a nested value that does not.

Beside tensors, numbers and containers these are NumPy's scalars and arrays, `argparse.Namespace`,
dataclasses without `__post_init__` and configurations of transformers: loading them fills
attributes. A class has to be imported already in the process that loads: nothing is imported
because a file says so.
"""

import argparse
import dataclasses
import io
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from mpxla.comm.codec import find_class
from mpxla.comm.objects import Entry, innermost

__all__ = ["find_unsafe", "foreign_classes"]

_HOOKS = ("__setstate__", "__reduce__", "__reduce_ex__", "__new__")


def foreign_classes(file: Any) -> tuple[list[Any], list[str]]:
    """Sorts the classes and functions of a file, or of its path, that torch's loader refuses.

    Returns:
        (what may be loaded, for `torch.serialization.safe_globals`; dotted paths of what may not).
    """
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    safe: list[Any] = []
    refused: list[str] = []
    for path in names:
        module, _, name = path.rpartition(".")
        found = find_class(module, name)
        if path in _NUMPY:
            safe.append((_NUMPY[path], path))
        elif found is not None and _is_plain(found):
            safe.append((found, path))
        else:
            refused.append(path)
    # The classes of dtypes are not named in a file: they are what `numpy.dtype` makes.
    return [*safe, *(_DTYPES if any(path in _NUMPY for path in names) else ())], refused


def find_unsafe(value: Any, what: str) -> Entry:
    """The innermost entry that loading refuses."""
    return innermost((what, value), _parts, lambda v: bool(foreign_classes(_saved(v))[1]))


def _saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


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


def _is_plain(kind: type) -> bool:
    """Whether unpickling fills attributes only."""
    if any(getattr(kind, hook, None) is not getattr(object, hook, None) for hook in _HOOKS):
        return False
    if kind is argparse.Namespace or _is_configuration(kind):
        return True
    # A file may also call the class, so that `__init__` has to be the one that fills fields.
    is_generated = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.init  # type: ignore[attr-defined]
    return is_generated and not hasattr(kind, "__post_init__")


def _is_configuration(kind: type) -> bool:
    transformers: Any = sys.modules.get("transformers")
    base = getattr(transformers, "PreTrainedConfig", None)
    return base is not None and issubclass(kind, base)


def _numpy_names() -> dict[str, Any]:
    """What pickles of arrays and scalars call, by the names of NumPy 1 and 2."""
    functions = {
        "_reconstruct": np.ndarray(0).__reduce__()[0],
        "scalar": np.float32(0).__reduce__()[0],
    }
    names = {
        f"numpy.{core}.multiarray.{name}": function
        for core in ("_core", "core")
        for name, function in functions.items()
    }
    return {**names, "numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype}


_NUMPY = _numpy_names()
_DTYPES = [type(np.dtype(kind)) for kind in (*np.typecodes["AllInteger"], *"?efdgFDSU")]
