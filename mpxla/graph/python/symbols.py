"""What Python computes with numbers of rows that masks choose: `math.sqrt(len(rows))`.

Torch's symbols know sums, products and other arithmetic of sizes. For all else they need a value,
and torch takes the one that is supposed (`counts.py`). Here they are numbers that are read
of the masks then, as `.item()` reads them (`number.py`): `loss * (len(rows) > 0)` computes with
them, and `int(len(rows))` asks.

This module must not know what becomes of the rows.
"""

import contextlib
import math
import operator
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx.experimental.sym_node import SymNode

from mpxla.graph.exchanged import exchanged
from mpxla.graph.python.number import NeedsValueError, NumberRead
from mpxla.graph.typed import SYMBOLIC
from mpxla.graph.user_code import is_called_by_user

__all__ = ["symbols_computed"]

_NumberOf = Callable[[Any], Any]


@contextlib.contextmanager
def symbols_computed(number_of: _NumberOf, is_of_masks: Callable[[Any], bool]) -> Generator[None]:
    """Lets the user's code compute with symbols as with numbers that were read.

    Args:
        number_of: gives the number in the place of a symbol of masks; all else as it is.
        is_of_masks: whether a value is such a symbol.
    """
    with (
        _as_numbers(torch.SymInt, number_of, _CONVERTED, _OF_SIZES),
        _as_numbers(torch.SymFloat, number_of, _CONVERTED, _OF_SIZES),
        _as_numbers(torch.SymBool, number_of, _CONVERTED, _OF_TRUTHS),
        _no_supposed_values(is_of_masks),
    ):
        yield


def _as_numbers(
    kind: Any, number_of: _NumberOf, converted: dict[str, Any], computed: dict[str, Any]
) -> AbstractContextManager[None]:
    """Exchanges methods of a kind of symbols, for the user's code."""

    def method(name: str, function: Callable[..., Any], has_value: bool) -> Any:
        own = getattr(kind, name, None)

        def call(symbol: Any, *others: Any) -> Any:
            number = number_of(symbol) if is_called_by_user() else symbol
            if not isinstance(number, SYMBOLIC):
                number = _whole(symbol, number) if has_value else number
                return function(number, *map(number_of, others))
            return NotImplemented if own is None else own(symbol, *others)

        return call

    methods = {name: method(name, f, True) for name, f in converted.items()}
    methods |= {name: method(name, f, False) for name, f in computed.items()}
    return exchanged(kind, **methods)


def _whole(symbol: Any, number: Any) -> Any:
    """What Python converts: whether there are rows, and how many, may be asked for."""
    if isinstance(symbol, torch.SymBool):
        return bool(symbol)
    is_read = issubclass(type(number), NumberRead)
    return int(number) if is_read and isinstance(symbol, torch.SymInt) else number


def _no_supposed_values(is_of_masks: Callable[[Any], bool]) -> AbstractContextManager[None]:
    """Keeps torch from going on with the value that it supposes of a symbol."""

    def refusing(name: str) -> Any:
        own = getattr(SymNode, name)

        def guard(node: Any, *args: Any) -> Any:
            if is_of_masks(torch.SymInt(node)):
                raise NeedsValueError("the number of rows that a mask chooses")
            return own(node, *args)

        return guard

    return exchanged(SymNode, **{name: refusing(name) for name in ("guard_int", "guard_float")})


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda own, other: function(other, own)


def _in_math(name: str) -> Callable[[Any], Any]:
    return lambda number: getattr(math, name)(number)  # of the module as it is during a capture


def _both(*functions: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Methods of operators of two numbers, of which either may be the symbol."""
    names = {f: f.__name__.strip("_") for f in functions}
    return {
        **{f"__{name}__": f for f, name in names.items()},
        **{f"__r{name}__": _reflected(f) for f, name in names.items()},
    }


_CONVERTED = {
    **{f"__{kind.__name__}__": kind for kind in (int, float, complex, hash)},
    "__index__": operator.index,
}
_OF_SIZES = {
    **_both(operator.mod, divmod, operator.and_, operator.or_, operator.xor),
    **_both(operator.lshift, operator.rshift),
    "__rpow__": _reflected(operator.pow),
    "__abs__": abs,
    "__round__": round,
    **{f"__{name}__": _in_math(name) for name in ("ceil", "floor", "trunc")},
    **{name: _in_math(name) for name in ("exp", "log", "log10", "log2", "sqrt")},  # for numpy
}
_OF_TRUTHS = {
    **_both(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    **_both(operator.mod, divmod, operator.pow),
    **{"__neg__": operator.neg, "__pos__": operator.pos, "__abs__": abs, "__round__": round},
}
