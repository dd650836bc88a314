"""Arrays that a step function makes of the model's tensors by `.numpy()`.

    return loss, logits.detach().cpu().numpy()
    predictions.append(logits.argmax(-1).cpu().numpy())
    accuracy = (logits.argmax(-1).numpy() == labels.numpy()).mean()

While the step is captured they have no values. What NumPy does with them is written down, as with
numbers (`recorded.py`), and done for each microbatch when the step has run. Where the step goes by
them, small ones become arrays of numbers, with which NumPy computes one by one.

This module must not know what is captured, nor where arrays are left.
"""

import contextlib
import operator
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, Self

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from mpxla.graph.exchanged import exchanged
from mpxla.graph.python.floats import Floats
from mpxla.graph.python.number import (
    NO_VALUE,
    Later,
    NeedsValueError,
    NumberRead,
    is_number,
    text_without_value,
)

__all__ = ["ArrayRead", "array_of", "arrays_in_numpy", "is_array_read", "with_numbers"]


def is_array_read(value: Any) -> bool:
    """Whether it stands for an array; it looks like one to `isinstance`."""
    return issubclass(type(value), ArrayRead)


class ArrayRead(Later):
    """Stands for an array, or for what NumPy makes of it."""

    def __init__(
        self,
        function: Callable[..., Any],
        *of: Any,
        floats: Floats | None = None,
        like: torch.Tensor | None = None,
    ):
        """`like` has its shape and dtype, if these are known."""
        super().__init__(function, *of)
        parts = [part for part in of if is_array_read(part)]
        self._floats = parts[0]._floats if parts else floats
        self._like = like

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor, floats: Floats) -> Self:
        """The array that shares memory with a tensor."""
        return cls(array_of, tensor.detach(), floats=floats, like=tensor)

    def numbers(self, by: str) -> Any:
        """Of a small one: an array of numbers without values, or a number.

        Raises:
            NeedsValueError: it is a large one, or of a type that PyTorch would not make of numbers.
        """
        function, of = self.made_by
        if function is not array_of:
            return function(*(_numbers_of(part, by) for part in of))
        (tensor,) = of
        if not _has_numbers(tensor):
            raise self.needed(by)
        found = np.empty(tensor.shape, dtype=object)
        for place in np.ndindex(*tensor.shape):
            found[place] = NumberRead(tensor[place])
        return found

    @property
    # Code that asks whether it is an array goes on as before.
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ArrayRead if self._like is None else np.ndarray

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"a NumPy array has no attribute {name!r}")
        if self._like is not None and name in _KNOWN:
            return _KNOWN[name](self._like)
        if name in _IN_PLACE:
            raise self.needed(name)
        if callable(getattr(np.ndarray, name)):
            return lambda *args, **kwargs: _called(partial(_method, name), (self, *args), kwargs)
        return ArrayRead(operator.attrgetter(name), self)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(np.ndarray, name):
            raise self.needed(f"writing to its {name}")
        super().__setattr__(name, value)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> "ArrayRead":
        if kwargs.get("out") is not None or method == "at":
            raise self.needed(ufunc.__name__)
        function = partial(_ufunc, ufunc) if method == "__call__" else getattr(ufunc, method)
        return _called(function, args, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> "ArrayRead":
        if kwargs.get("out") is not None or func.__name__ in _WRITING:
            raise self.needed(func.__name__)
        return _called(func, args, kwargs)

    def __iter__(self) -> Iterator[Any]:
        if self._like is None:
            return iter(self.numbers("__iter__"))
        return (_called(operator.getitem, (self, i), {}) for i in range(len(self)))

    def __len__(self) -> int:
        return len(self.numbers("__len__") if self._like is None else self._like)

    def __float__(self) -> float:
        found = None if self._floats is None else self._floats.of_unknown()
        return float(self.numbers("__float__")) if found is None else found

    def __bool__(self) -> bool:
        return bool(self.numbers("__bool__"))

    def __int__(self) -> int:
        return int(self.numbers("__int__"))

    def __index__(self) -> int:
        return operator.index(self.numbers("__index__"))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = np.empty((), dtype=object)
        found[()] = numbers = self.numbers("__array__")
        return np.asarray(numbers if isinstance(numbers, np.ndarray) else found, dtype)

    def item(self, *place: int) -> "ArrayRead":
        """A Python number."""
        return _called(partial(_method, "item"), (self, *place), {})

    def __str__(self) -> str:
        return text_without_value("array", _called(str, (self,), {}), "")

    def __repr__(self) -> str:
        return NO_VALUE.format("array")

    def needed(self, by: str) -> NeedsValueError:
        """The error of code that needs the value in Python."""
        return NeedsValueError(f"the value of an array is needed in Python, by {by}")


@contextlib.contextmanager
def arrays_in_numpy() -> Generator[None]:
    """Lets functions take arrays without values that NumPy asks nobody about."""

    def taking(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(value: Any, *args: Any, **kwargs: Any) -> Any:
            value = value.numpy() if isinstance(value, FakeTensor) else value
            given = (value, *args)
            if not any(is_array_read(leaf) for leaf in pytree.tree_leaves(value)):
                return function(*given, **kwargs)
            is_alike = is_array_read(value) and not args and not kwargs
            return _called(function, given, kwargs, value._like if is_alike else None)

        return called

    with exchanged(np, **{name: taking(getattr(np, name)) for name in _MAKERS}):
        yield


def with_numbers(tree: Any, by: str) -> Any:
    """Arguments of torch, with numbers in the places of arrays."""
    return pytree.tree_map(partial(_numbers_of, by=by), tree)


def _numbers_of(value: Any, by: str) -> Any:
    return value.numbers(by) if is_array_read(value) else value


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """An array that shares no memory: a program's buffers are written to again."""
    return tensor.cpu().numpy().copy()


def _called(
    function: Callable[..., Any], args: Any, kwargs: Any, like: torch.Tensor | None = None
) -> ArrayRead:
    """What a function gives when the arrays among its arguments are there."""
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    slices = (leaf for leaf in leaves if isinstance(leaf, slice))
    for part in (part for s in slices for part in (s.start, s.stop, s.step)):
        if isinstance(part, Later) or is_number(part):
            raise NeedsValueError("a number without a value is needed in Python, by a slice")
    return ArrayRead(partial(_call, function, structure), *leaves, like=like)


def _call(function: Callable[..., Any], structure: pytree.TreeSpec, *leaves: Any) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return function(*args, **kwargs)


def _ufunc(ufunc: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls what has its name in NumPy now: that of a capture takes numbers without values."""
    return getattr(np, ufunc.__name__, ufunc)(*args, **kwargs)


def _method(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of an array, or of what NumPy has in the place of arrays of no dimension."""
    return getattr(value, name)(*args, **kwargs)


def _operator(name: str, is_reflected: bool = False) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(operator, f"__{name}__")

    def method(self: ArrayRead, *others: Any) -> Any:
        args = (*others, self) if is_reflected else (self, *others)
        if any(isinstance(other, torch.Tensor) for other in others):  # it makes tensors of both
            return function(*(_as_operand(arg, name) for arg in args))
        return _called(function, args, {})

    return method


def _as_operand(value: Any, by: str) -> Any:
    found = _numbers_of(value, by)
    return torch.as_tensor(found) if isinstance(found, np.ndarray) else found


def _needing(name: str) -> Callable[..., Any]:
    def method(self: ArrayRead, *_: Any, **__: Any) -> Any:
        raise self.needed(f"__{name}__")

    return method


def _has_numbers(tensor: torch.Tensor) -> bool:
    # Of another type, a tensor made of the array would have the wrong one.
    is_few = tensor.dtype is torch.get_default_dtype() and tensor.numel() <= _MOST_NUMBERS
    return is_few or (tensor.dtype is torch.int64 and tensor.dim() == 1)


_MOST_NUMBERS = 64
"""So many floats may be an array of numbers, each of which is an operator of the step."""
_KNOWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda tensor: tuple(tensor.shape),
    "ndim": torch.Tensor.dim,
    "size": torch.Tensor.numel,
    "dtype": lambda tensor: np.dtype(str(tensor.dtype).removeprefix("torch.")),
}
_MAKERS = "array asarray ascontiguousarray".split()
_IN_PLACE = "byteswap fill partition put resize setfield setflags sort".split()
_WRITING = "copyto fill_diagonal place put put_along_axis putmask".split()
_TWO = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()

for _name in (*_TWO, *"lt le gt ge eq ne getitem neg pos abs invert".split()):
    setattr(ArrayRead, f"__{_name}__", _operator(_name))
for _name in _TWO:
    setattr(ArrayRead, f"__r{_name}__", _operator(_name, is_reflected=True))
# Arrays would change in place, and the tensors that share their memory.
for _name in (*(f"i{name}" for name in _TWO), "setitem", "complex", "contains"):
    setattr(ArrayRead, f"__{_name}__", _needing(_name))
ArrayRead.__hash__ = object.__hash__
