"""Python numbers without a value while a step is captured: they compute as numbers do.

Those are floats that are inputs of the step, so that one program serves all values, and what
`.item()` reads. With tensors and other numbers they compute on the device. Code that needs the
value in Python (a branch, `math.exp`, the probability of a dropout) raises; the step is then
captured again with the value, if it is known: that of an input.
This module must not know how a step is captured or run.
"""

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from mpxla.graph.exchanged import exchanged

__all__ = [
    "NO_VALUE",
    "Later",
    "NeedsValueError",
    "Number",
    "NumberRead",
    "as_float",
    "extreme_number",
    "has_number",
    "holds_objects",
    "is_number",
    "made_later",
    "numbers_in_math",
    "takes_numbers_as_tensors",
    "text_without_value",
    "values_in",
]

_KINDS = {torch.float64: float, torch.int64: int, torch.bool: bool}


class NeedsValueError(TypeError):
    """Python needs the value of a number that `.item()` has read."""


class Number:
    """Stands for a Python number; its tensor is float64, int64 or bool, of shape [].

    Arithmetic with Python numbers is done in 64 bits, as Python does. Together with tensors it has
    the dtype that a Python number would lead to.

    Attributes:
        made_by: the function of Python and the numbers that it was computed of, if it was not read.
        is_before: whether it depends on what a place outside of the step held before it.
    """

    made_by: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    is_before = False

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    @property
    # Code that asks `isinstance(x, float)` goes on as before.
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _KINDS[self.tensor.dtype]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Calls an operator of torch with tensors of the right dtype in the place of numbers."""
        leaves = pytree.tree_leaves((args, kwargs))
        arrays = (array.flat for array in leaves if holds_objects(array))
        for number in filter(is_number, itertools.chain(*arrays)):
            raise number.needed(func.__name__)  # torch takes arrays by calling this for ever
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        is_exact = func.__name__.strip("_") in _EXACT

        def as_tensor(leaf: Any) -> Any:
            if not is_number(leaf):
                return leaf
            dtype = _common_dtype(leaf, tensors)
            return leaf.tensor.to(_exact_dtype(dtype, tensors) if is_exact else dtype)

        read = next((leaf for leaf in leaves if issubclass(type(leaf), NumberRead)), None)
        if read is not None and (func in _COUNTING or (func in _INDEXING and has_number(args[1]))):
            raise read.needed(func.__name__)
        args, kwargs = _without_factor(func, args, kwargs or {})
        args, kwargs = pytree.tree_map(as_tensor, (args, kwargs))
        try:
            return func(*args, **kwargs)
        except TypeError as error:
            raise error if read is None else read.needed(func.__name__) from error

    def __neg__(self) -> "Number":
        return _made(-_computed(self), operator.neg, self)

    def __pos__(self) -> "Number":
        return _made(_computed(self), operator.pos, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __abs__(self) -> "Number":
        return _made(_computed(self).abs(), abs, self)

    def in_python(self, name: str, operands: list[Any]) -> list[Any]:
        """Operands by which integers go as in Python; a zero may be an error there, for one."""
        raise self.needed(name)

    def __repr__(self) -> str:
        return "<a float that is an input of the step>"

    def needed(self, by: str) -> Exception:
        """The error of code that needs the value in Python."""
        return TypeError(f"the value of {self!r} is needed in Python, by {by}")


class Later:
    """A tensor that Python makes when the step has run, of tensors of the step and what is outside.

    A step cannot compute with it.

    Attributes:
        made_by: the function and what it was given.
    """

    def __init__(self, function: Callable[..., Any], *of: Any):
        self.made_by = function, of

    def detach(self) -> "Later":
        """It has no gradient."""
        return self

    def item(self) -> "Later":
        """Its number."""
        return Later(torch.Tensor.item, self)

    def __neg__(self) -> "Later":
        return Later(operator.neg, self)

    def __format__(self, spec: str) -> str:
        return text_without_value("tensor", self, spec)

    def __bool__(self) -> bool:
        raise TypeError("it is made when the step has run")


class NumberRead(Number):
    """Stands for what `.item()` has read of a tensor, whose value nobody knows yet."""

    def __init__(self, tensor: torch.Tensor, is_own: bool = False):
        """`is_own`: nobody else has the tensor, which is of shape [] and needs no gradient."""
        kind = tensor.dtype
        wide = torch.float64 if kind.is_floating_point else torch.int64
        kind = kind if kind is torch.bool else wide
        if not is_own or tensor.dtype is not kind:  # a copy, which later writes do not reach
            tensor = tensor.detach().reshape(()).to(kind, copy=True)
        super().__init__(tensor)

    def __round__(self, digits: int | None = None) -> "NumberRead":
        value = _computed(self)
        if not value.is_floating_point():
            return NumberRead(value) if digits is None else self._refuse("__round__")
        rounded = torch.round(value, decimals=digits or 0)
        return _made(rounded.long() if digits is None else rounded, round, self, digits)

    def round(self, decimals: int = 0, out: None = None) -> "NumberRead":
        """What `np.round` calls."""
        return _made(torch.round(_computed(self), decimals=decimals), np.round, self, decimals)

    def __bool__(self) -> bool:
        return bool(self.tensor)  # whoever follows the tensor may know

    def in_python(self, name: str, operands: list[Any]) -> list[Any]:
        """Asks for the sign of an exponent, and whether a divisor is zero."""
        base, last = operands
        if name == "pow" and last < 0:  # a float
            return [torch.as_tensor(base).double(), last]
        if name != "pow" and last == 0:
            raise ZeroDivisionError("integer division or modulo by zero")
        return operands

    def _refuse(self, by: str) -> Any:
        raise self.needed(by)

    def __float__(self) -> float:
        return self.tensor.__float__()  # whoever follows the tensor may know

    def value(self, by: str, may_ask: bool = False) -> Any:
        """The value, for code that needs it in Python, where that of the tensor is known.

        It may ask for an integer that is not (`answers.py`).
        """
        found = self.tensor.item()
        if is_number(found) and may_ask and not self.tensor.is_floating_point():
            found = self.tensor.__int__()
        return found if type(found) in (bool, int, float) else self._refuse(by)

    def __repr__(self) -> str:
        return NO_VALUE.format("number")

    def __str__(self) -> str:
        return format(self)

    def __format__(self, spec: str) -> str:
        # Modules are chosen by the texts of integers, `self.blocks[f"{self.depth}"]`.
        found = self.tensor.item() if self.tensor.dtype is torch.int64 else self
        is_open = is_number(found)
        return text_without_value("number", self, spec) if is_open else format(found, spec)

    def needed(self, by: str) -> Exception:
        """The error of code that needs the value in Python."""
        return NeedsValueError(f"the value of {self!r} is needed in Python, by {by}")


NO_VALUE = "<{}: no value while the step is captured; smp.debug_print(tensor) prints values>"
"""What the user's texts say in the place of values."""


_texts: dict[str, tuple[Any, str]] = {}
"""What stands for values in texts of the step that is captured, with formats."""


def text_without_value(kind: str, value: Any, spec: str) -> str:
    """What `format` gives; `values_in` knows it again where the step leaves a text with it."""
    text = NO_VALUE.format(f"{kind} {len(_texts) + 1}")
    _texts[text] = value, spec
    return text


def values_in(text: str) -> list[tuple[str, Any, str]]:
    """Parts of a text that stand for values, with these and their formats."""
    return [(part, *found) for part, found in _texts.items() if part in text]


def as_float(value: Any) -> Any:
    """What `float()` would be, of a number without a value too."""
    value = value.item() if holds_objects(value) else value
    if not issubclass(type(value), NumberRead):
        return float(value)
    return value if value.tensor.is_floating_point() else _made(value.tensor.double(), float, value)


@contextlib.contextmanager
def numbers_in_math(number_of: Callable[[Any], Any]) -> Generator[None]:
    """Lets functions of `math` compute with numbers that were read, as tensors of 64 bits.

    `number_of` gives such a number in the place of what is one as well.
    """

    def of_numbers(module: Any, name: str) -> Callable[..., Any]:
        own: Callable[..., Any] = getattr(module, name)

        def function(number: Any, *others: Any, **named: Any) -> Any:
            number = number_of(number)
            is_one = holds_objects(number) and not number.shape
            given: Any = number.item() if is_one else number
            pair = (given, *map(number_of, others))
            if len(pair) == 2 and name in _OF_TWO and any(map(is_number, pair)):
                return _in_math_of_two(name, *pair)
            if others or named or not issubclass(type(given), NumberRead):
                return own(number, *others, **named)
            return _in_math(name, given)

        return function

    # Of NumPy's functions, others call methods; these know floats only.
    with (
        exchanged(math, **{name: of_numbers(math, name) for name in {**_OF_MATH, **_OF_TWO}}),
        exchanged(np, **{name: of_numbers(np, name) for name in _OF_FINITE}),
    ):
        _texts.clear()
        yield
    _texts.clear()


def _in_math(name: str, number: NumberRead) -> Any:
    found = getattr(torch, _OF_MATH[name])(_computed(number).double())
    own: Callable[..., Any] = _FUNCTIONS[name]
    return _made(found.long() if name in _TO_INTEGERS else found, own, number)


def _in_math_of_two(name: str, *numbers: Any) -> Any:
    one, other = ((_computed(v) if is_number(v) else torch.as_tensor(v)).double() for v in numbers)
    return _made(_OF_TWO[name](one, other), _FUNCTIONS[name], *numbers)


_OF_TWO: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("atan2", "copysign", "fmod", "hypot", "pow")},
    "log": lambda one, base: one.log() / base.log(),
}
_TO_INTEGERS = ("ceil", "floor", "trunc")
_OF_FINITE = ("isfinite", "isinf", "isnan")
_OF_MATH = {
    **{name: name for name in ("exp", "expm1", "log", "log10", "log1p", "log2", "sqrt")},
    **{name: name for name in ("cos", "sin", "tan", "atan", "cosh", "sinh", "tanh")},
    **{name: name for name in _TO_INTEGERS},
    "fabs": "abs",
    **{name: name for name in _OF_FINITE},
}
"""Functions of `math`, and torch's."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name) for name in {**_OF_MATH, **_OF_TWO}
}


def extreme_number(function: Callable[..., Any], is_max: bool, first: Any, second: Any) -> Any:
    """What Python's `max` or `min` gives of two numbers: the first one, but for a better second.

    NotImplemented for an int and a float, of which it is either: Python has to decide.
    """
    if {first.__class__, second.__class__} not in ({int}, {float}):
        return NotImplemented
    one, other = (_computed(v) if is_number(v) else v for v in (first, second))
    is_better = other > one if is_max else other < one
    return _made(torch.where(is_better, other, one), function, first, second)


def _without_factor(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the second one times a factor that stands for a number, if there is one.

    `torch.add(x, y, alpha=2)` takes Python's numbers only.
    """
    factor = kwargs.get(_FACTORS.get(func.__name__.strip("_"), ""))
    if not is_number(factor) or len(args) < 2:
        return tuple(args), kwargs
    first, second, *others = args
    return (first, second * factor, *others), {k: v for k, v in kwargs.items() if v is not factor}


def is_number(value: Any) -> bool:
    """Whether it stands for a Python number; it looks like one to `isinstance`."""
    return issubclass(type(value), Number)


def holds_objects(value: Any) -> bool:
    """Whether it is an array of Python's objects, as of numbers."""
    return issubclass(type(value), np.ndarray) and value.dtype.hasobject


def made_later(func: Any, args: tuple[Any, ...]) -> Later | None:
    """What arithmetic of torch gives of a tensor and what a place held before the step.

    Or which of both is larger; `torch.max` of one tensor and a dimension is another function.
    """
    name = getattr(func, "__name__", "").strip("_")
    is_of_two = len(args) == 2 and (name in _EXACT or name in _EXTREME)
    later = [isinstance(v, Later) or (is_number(v) and v.is_before) for v in args]
    if not is_of_two or not any(later):
        return None
    is_tensor = [isinstance(v, torch.Tensor) for v in args]
    is_taken = name in _EXACT or all(map(operator.or_, later, is_tensor))
    return Later(func, *args) if is_taken else None


def has_number(tree: Any) -> bool:
    """Whether one of its leaves, or the end of a slice among them, stands for a number."""
    leaves = pytree.tree_leaves(tree)
    ends = [end for leaf in leaves if isinstance(leaf, slice) for end in (leaf.start, leaf.stop)]
    return any(map(is_number, (*leaves, *ends)))


def takes_numbers_as_tensors(func: Any) -> bool:
    """Whether a function of torch computes with a tensor of one element as with a number."""
    name = getattr(func, "__name__", "").strip("_")
    return name in _TAKING or name in _EXACT


def _computed(number: Number) -> torch.Tensor:
    """What arithmetic computes with: a bool is an int there."""
    return number.tensor.long() if number.tensor.dtype is torch.bool else number.tensor


def _made(tensor: torch.Tensor, function: Callable[..., Any], *of: Any) -> Any:
    """A number that is computed of others."""
    is_read = any(issubclass(type(value), NumberRead) for value in of)
    found = NumberRead(tensor, is_own=True) if is_read else Number(tensor)
    found.made_by = function, of
    found.is_before = any(is_number(value) and value.is_before for value in of)
    return found


def _common_dtype(number: Number, tensors: list[torch.Tensor]) -> torch.dtype:
    """What a Python number becomes beside these tensors."""
    own = number.tensor.dtype
    if not tensors:
        return own
    dtype = tensors[0].dtype
    for other in tensors[1:]:
        dtype = torch.promote_types(dtype, other.dtype)
    if dtype.is_floating_point or dtype.is_complex or own is torch.bool:
        return dtype
    if own is torch.float64:
        return torch.get_default_dtype()
    return own if dtype is torch.bool else dtype


def _exact_dtype(dtype: torch.dtype, tensors: list[torch.Tensor]) -> torch.dtype:
    """Arithmetic of 16-bit tensors takes a Python float in float32, without rounding it first."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_half and any(t.dim() for t in tensors) else dtype


_EXACT = frozenset(
    prefix + name for name in ("add", "sub", "mul", "truediv", "div") for prefix in ("", "r", "i")
)


_EXTREME = ("max", "maximum", "fmax", "min", "minimum", "fmin")


_FACTORS = {
    **dict.fromkeys(("add", "sub", "subtract"), "alpha"),
    **dict.fromkeys(("addcmul", "addcdiv"), "value"),
}


def _arithmetic(name: str, is_reflected: bool) -> Callable[..., Any]:
    function: Callable[[Any, Any], Any] = getattr(operator, name)

    def method(self: Number, other: Any) -> Any:
        if isinstance(other, Later) or (self.is_before and isinstance(other, torch.Tensor)):
            return Later(function, *((other, self) if is_reflected else (self, other)))
        if isinstance(other, torch.Tensor):
            dtype = _exact_dtype(_common_dtype(self, [other]), [other])
            operands = [self.tensor.to(dtype), other]
        elif is_number(other):
            operands = [_computed(self), _computed(other)]
        elif type(other) in (bool, int, float):
            operands = [_computed(self), other]
        else:
            return NotImplemented
        operands = operands[::-1] if is_reflected else operands
        if isinstance(other, torch.Tensor):
            return function(*operands)
        given = (other, self) if is_reflected else (self, other)
        if name == "truediv" or any(map(_is_float, operands)):
            operands = [v.double() if isinstance(v, torch.Tensor) else v for v in operands]
        elif name in _OF_INTEGERS and not (isinstance(operands[1], int) and operands[1] > 0):
            operands = self.in_python(name, operands)
        return _made(function(*operands), function, *given)

    return method


def _later(name: str, is_reflected: bool) -> Callable[..., Any]:
    function: Callable[[Any, Any], Any] = getattr(operator, name)

    def method(self: Later, other: Any) -> Later:
        return Later(function, *((other, self) if is_reflected else (self, other)))

    return method


def _is_float(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else type(value) is float


def _comparison(name: str) -> Callable[..., Any]:
    function: Callable[[Any, Any], Any] = getattr(operator, name)

    def method(self: Number, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return function(self.tensor, other)
        if is_number(other) or type(other) in (bool, int, float):
            value = _computed(other) if is_number(other) else other
            return _made(function(_computed(self), value), function, self, other)
        return NotImplemented

    return method


def _needs_value(name: str) -> Callable[..., Any]:
    def method(self: Number, *_: Any) -> Any:
        raise self.needed(name)

    return method


def _of_value(name: str, function: Callable[[Any], Any]) -> Callable[..., Any]:
    def method(self: NumberRead) -> Any:
        if name == "int" and self.tensor.is_floating_point():
            self = NumberRead(self.tensor.long())  # what decides is the integer
        return function(self.value(f"__{name}__", name in _OF_INTEGER))

    return method


_TAKING = frozenset(
    "eq ne lt le gt ge pow rpow ipow remainder mod rmod floordiv rfloordiv floor_divide maximum "
    "minimum clamp clamp_min clamp_max clip lerp where masked_fill fill copysign atan2 tensor "
    "as_tensor scalar_tensor true_divide item bool int float index detach reshape to".split()
)


def _of_bits(name: str, is_reflected: bool) -> Callable[..., Any]:
    function: Callable[[Any, Any], Any] = getattr(operator, f"__{name}__")

    def method(self: NumberRead, other: Any) -> Any:
        own = self.value(name, may_ask=True)
        return function(other, own) if is_reflected else function(own, other)

    return method


_OF_INTEGER = {"int": int, "index": int, "hash": hash}
"""What Python reads of an integer whose values may be few: a place, or a number of turns."""
_OF_INTEGERS = ("floordiv", "mod", "pow")
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_COUNTING = (
    *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand),
    *(torch.randint, torch.randn, torch.randperm, torch.zeros),
)
"""Numbers are shapes there."""


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _arithmetic(_name, is_reflected=False))
    setattr(Number, f"__r{_name}__", _arithmetic(_name, is_reflected=True))
    setattr(Later, f"__{_name}__", _later(_name, is_reflected=False))
    setattr(Later, f"__r{_name}__", _later(_name, is_reflected=True))
for _name in (
    *("bool", "float", "int", "complex", "index", "round", "trunc", "floor", "ceil", "hash"),
    *("lt", "le", "gt", "ge", "eq", "ne", "str", "format"),
):
    setattr(Number, f"__{_name}__", _needs_value(f"__{_name}__"))
for _name, _function in {"complex": complex, **_OF_INTEGER}.items():
    setattr(NumberRead, f"__{_name}__", _of_value(_name, _function))
for _name in ("and", "or", "xor", "lshift", "rshift"):
    setattr(NumberRead, f"__{_name}__", _of_bits(_name, is_reflected=False))
    setattr(NumberRead, f"__r{_name}__", _of_bits(_name, is_reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(NumberRead, f"__{_name}__", _comparison(_name))
# NumPy's functions of arrays of objects call methods of their names.
for _name in _OF_MATH.keys() - _TO_INTEGERS:
    setattr(
        NumberRead, _name, functools.partialmethod(lambda self, name: _in_math(name, self), _name)
    )
