"""Objects that travel in checkpoints as data, beside tensors, numbers and containers.

These are NumPy's scalars and arrays, `argparse.Namespace`, dataclasses without `__post_init__` and
configurations of transformers: loading them fills attributes. A class has to be imported already in
the process that loads: nothing is imported because a file says so.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["safe_classes"]

_HOOKS = ("__setstate__", "__reduce__", "__reduce_ex__", "__new__")


def safe_classes(names: Iterable[str]) -> tuple[list[Any], list[str]]:
    """Sorts the names that torch's safe loader does not know.

    Args:
        names: dotted paths of classes and functions in a file, from
            `torch.serialization.get_unsafe_globals_in_checkpoint`.

    Returns:
        (what may be loaded, for `torch.serialization.safe_globals`; names of what may not).
    """
    safe: list[Any] = []
    refused: list[str] = []
    for path in names:
        found = _find(path)
        if path in _NUMPY:
            safe.append((_NUMPY[path], path))
        elif isinstance(found, type) and _is_plain(found):
            safe.append((found, path))
        else:
            refused.append(path)
    # The classes of dtypes are not named in a file: they are what `numpy.dtype` makes.
    return [*safe, *(_DTYPES if any(path in _NUMPY for path in names) else ())], refused


def _find(path: str) -> Any:
    """What a dotted path names, among the modules that are imported already."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


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
