"""`float(loss)` while a step is captured, of values that nobody knows then.

Python's `float` insists on a number with a value. So modules whose functions call it for such
values see another class by that name, for the time of a capture: it gives what `.item()` does, and
is `float` in all else. Which modules do is found by trying: the step is captured once more then.

This module must not know what is traced.
"""

import ast
import contextlib
import dis
import functools
import linecache
import math
import sys
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import numpy as np
import torch

from mpxla.graph.python.number import Later, NumberRead, as_float
from mpxla.graph.user_code import AgainError, at_user_line
from mpxla.log import warn_once
from mpxla.user_lines import is_model_code

__all__ = ["Floats"]

_REMAINDER = next(i for i, (name, _) in enumerate(dis._nb_ops) if name == "NB_REMAINDER")  # pyright: ignore


class Floats:
    """Modules that see another `float`, by the identity of their namespaces."""

    def __init__(self) -> None:
        self._modules: dict[int, dict[str, Any]] = {}

    def of_unknown(self) -> float | None:
        """What `float()` gives, in the module that has called it, of a number without a value.

        It is not a number where a text is made, and None where there is no answer.

        Raises:
            AgainError: there will be one in the next capture.
        """
        frame = _calling()
        if _formats(frame):
            warn_once(
                f"format{at_user_line()}",
                f"the step function writes a number into a text{at_user_line()}. It has no value "
                f"while the step is captured, and the text says nan: use smp.debug_print(tensor), "
                f"or return it and print its reduce_mean().",
            )
            return math.nan
        own = frame.f_globals
        is_float = "float" in frame.f_code.co_names and "float" not in own
        if is_float and not _needs_own(frame.f_code.co_filename):
            see = functools.partial(self._modules.__setitem__, id(own), own)
            raise AgainError(own.get("__name__"), see)
        return None

    @contextlib.contextmanager
    def exchanged(self, number_of: Callable[[Any], Any]) -> Generator[None]:
        """Shows the other class to modules; `number_of` gives numbers in the place of symbols."""
        kind = _float_of(number_of)
        modules = [m for m in self._modules.values() if "float" not in m]
        for module in modules:
            module["float"] = kind
        try:
            yield
        finally:
            for module in modules:
                module.pop("float", None)


def _float_of(number_of: Callable[[Any], Any]) -> type:
    class Kind(type(float)):
        def __call__(cls, *args: Any) -> Any:
            value = number_of(args[0]) if len(args) == 1 else None
            if isinstance(value, Later):
                return type(value)(as_float, value)
            if isinstance(value, torch.Tensor | np.ndarray):
                value = value.item()
            number: Any = value
            return as_float(number) if issubclass(type(value), NumberRead) else float(*args)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, float)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, float)

        def __eq__(cls, other: object) -> bool:
            return other is float or other is cls

        def __hash__(cls) -> int:
            return hash(float)

    return Kind("float", (float,), {"dtype": np.dtype(float)})  # which NumPy looks for


def _calling() -> FrameType:
    """The innermost frame that is neither of this package nor of torch."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back and _is_own(frame):
        frame = frame.f_back
    return frame


def _is_own(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "").partition(".")[0]
    return name in ("mpxla", "torch") and not is_model_code(frame.f_code.co_filename)


def _formats(frame: FrameType) -> bool:
    """Whether a frame is at `text % numbers`."""
    code = frame.f_code.co_code
    return code[frame.f_lasti : frame.f_lasti + 2] == bytes((dis.opmap["BINARY_OP"], _REMAINDER))


@functools.cache
def _needs_own(filename: str) -> bool:
    """Whether code of a file may ask `is float`, or give PyTorch `float` as a dtype."""
    if not is_model_code(filename):
        return True
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # of a notebook's cell
        return True
    return any(map(_needs, ast.walk(tree)))


def _needs(node: ast.AST) -> bool:
    used: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        is_identity = any(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops)
        used = [node.left, *node.comparators] if is_identity else []
    elif isinstance(node, ast.keyword):
        used = [node.value] if node.arg == "dtype" else []
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        used = node.args if node.func.attr in ("to", "type") else []
    return any(isinstance(one, ast.Name) and one.id == "float" for one in used)
