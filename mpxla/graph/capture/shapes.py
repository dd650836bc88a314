"""Calls with fixed shapes in the place of those whose shapes PyTorch takes from values.

Where masks and counts are known while a step is captured, so is what they choose. This module must
not know how values are known.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor

from mpxla.graph.capture.occurrences import are_below, counted, distinct, distinct_in_turn
from mpxla.graph.python.number import NumberRead
from mpxla.graph.user_code import at_user_line

__all__ = ["DISTINCT", "FixedShapes", "is_place"]

_SIZES = frozenset("arange empty full ones zeros".split())
"""They take numbers, and a tensor of one element for a number."""
_ALSO_NUMBERS = ("interpolate", "narrow")
_PLACES = frozenset(("argwhere", "nonzero", "where"))
DISTINCT = {"unique": distinct, "unique_consecutive": distinct_in_turn}
_COUNTING = {
    "bincount": ("input", "weights", "minlength"),
    "one_hot": ("tensor", "num_classes"),
    **dict.fromkeys(DISTINCT, ("input",)),
}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_get, _set = torch.Tensor.__getitem__, torch.Tensor.__setitem__


_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class FixedShapes:
    """Exchanges calls of one captured step.

    Args:
        ask: (function, value) -> what the function says of a tensor whose value is known; None of
            all else.
        varies: whether a tensor follows from inputs of the step.

    Attributes:
        counted: where values are counted, and whether all of them have a place, bool [].
    """

    def __init__(
        self,
        ask: Callable[[Callable[[torch.Tensor], Any], Any], Any],
        varies: Callable[[torch.Tensor], bool],
    ):
        self._ask, self._varies = ask, varies
        self.counted: list[tuple[str, torch.Tensor]] = []

    def fixed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """The call to make in the place of one, mostly itself."""
        name = getattr(func, "__name__", "")
        if name == "masked_select" and "out" not in kwargs:
            tensor, mask = _arguments(("input", "mask"), args, kwargs)
            shape = torch.broadcast_shapes(tensor.shape, mask.shape)
            full = mask.broadcast_to(shape)
            if dims := _repeated_dims(full):
                rows = self._of_rows(full, mask, dims)
                return _rows, (tensor.broadcast_to(shape), rows, dims), {}
            places = self._places(mask, full)
            index = full if places is None else places
            return _get, (tensor.broadcast_to(shape), index), {}
        if func is _get or func is _set:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            dims = _repeated_dims(index[0]) if len(index) == 1 else ()
            if dims and (func is _get or _are_rows(*args)):
                rows = self._of_rows(index[0], index[0], dims)
                return _ROWS[func], (args[0], rows, dims, *args[2:]), kwargs
            index = tuple(map(self._as_numbers, index))
            index = self._places_of_masks(index) if func is _get else index
            return func, (args[0], index, *args[2:]), kwargs
        if name in _PLACES and self._varies(args[0]) and (name != "where" or len(args) == 1):
            places = self._places(args[0], args[0])
            as_tuple = name == "where" or kwargs.get("as_tuple") or args[1:] == (True,)
            if places is not None:
                return (tuple, (places,), {}) if as_tuple else (torch.stack, (places, 1), {})
        if name == "repeat_interleave":
            tensor, repeats, dim = _arguments(("input", "repeats", "dim"), args, kwargs)
            tensor, dim = (tensor.flatten(), 0) if dim is None else (tensor, dim)
            count = tensor.shape[dim]
            places = self._ask(lambda n: torch.arange(count).repeat_interleave(n), repeats)
            if places is not None:
                return torch.index_select, (tensor, dim, places), {}
        if name in _COUNTING:
            found = self._counting(name, args, kwargs)
            return (func, args, kwargs) if found is None else found
        if name in _SIZES:
            args, kwargs = pytree.tree_map(self.as_number, (args, kwargs))
            args = tuple(NumberRead(v) if isinstance(v, FakeTensor) else v for v in args)
        elif _takes_numbers(name) and args:
            args, kwargs = (
                (args[0], *pytree.tree_map(self._number_of, args[1:])),
                {key: pytree.tree_map(self._number_of, value) for key, value in kwargs.items()},
            )
        return func, args, kwargs

    def _number_of(self, part: Any) -> Any:
        """An integer tensor without axes as a number, whether it is known or not."""
        part = self.as_number(part)
        return NumberRead(part) if isinstance(part, FakeTensor) and is_place(part) else part

    def _counting(self, name: str, args: Any, kwargs: Any) -> _Call | None:
        """A call in the place of one whose shape depends on which values there are; of constants
        it is known.
        """
        values, *others = _arguments(_COUNTING[name], args, kwargs)
        varies = self._varies(values)
        if not varies and self._ask(torch.Tensor.numel, values) is not None:
            return None
        if name == "bincount":
            size = self._number_of_places(values, others[1] or 0)
            return None if size is None else (counted, (values, others[0], size), {})
        if name == "one_hot":
            size = others[0]  # which may be a tensor
            if size is None or (type(size) is int and size == -1):
                size = self._number_of_values(values) or -1
            one_hot = functools.partial(F.one_hot, num_classes=size)
            return (one_hot, (values,), {}) if varies else None
        # Where values of inputs are needed, they are here: for a loop over them, probably.
        if varies or kwargs["dim"] is not None or not values.numel():
            return None
        asked = kwargs["return_inverse"], kwargs["return_counts"]
        return DISTINCT[name], (values, *asked), {}

    def _number_of_places(self, values: torch.Tensor, least: Any) -> int | None:
        """How many values may be counted; where they are not known, as many as the user says."""
        if least == 0:
            return self._number_of_values(values)
        if type(least) is not int:
            return None
        self.counted.append((at_user_line(), are_below(values, least)))
        return least

    def _number_of_values(self, values: torch.Tensor) -> int | None:
        """How many a table of what is known must have."""
        return self._ask(lambda known: int(known.max()) + 1 if known.numel() else 0, values)

    def _places_of_masks(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        """An index with the places of known masks, which have a known number, for the masks."""
        found: list[Any] = []
        for part in index:
            if isinstance(part, list) and part and all(isinstance(v, bool) for v in part):
                part = [place for place, is_chosen in enumerate(part) if is_chosen]
            places = None
            if isinstance(part, torch.Tensor) and part.dtype is torch.bool and part.dim():
                places = self._places(part, part)
            found += [part] if places is None else places
        return tuple(found)

    def _of_rows(self, mask: torch.Tensor, known: torch.Tensor, dims: tuple[int, ...]) -> Any:
        """An index that chooses the rows of a mask, whose last dims repeat what is before them."""
        first = (..., *(0 for _ in dims))
        rows, base = mask[first], mask._base
        if base is not None and _geometry(base) == _geometry(rows):
            rows = base  # of which counts are one with those of the mask that was expanded
        places = self._places(known, rows, lambda v: v.broadcast_to(mask.shape)[first])
        return rows if places is None else places

    def _places(
        self,
        known: torch.Tensor,
        mask: torch.Tensor,
        made: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Any:
        """Along each dim, the places where a mask is true, which is known or made of what is; None
        where it is not. Of inputs, only their number is fixed.
        """
        made = made or (lambda value: value.broadcast_to(mask.shape))
        if not self._varies(known):
            places = self._ask(lambda value: made(value).nonzero(), known)
            return None if places is None else places.unbind(1)
        count = self._ask(lambda value: int(made(value).count_nonzero()), known)
        return None if count is None else torch.nonzero_static(mask, size=count).unbind(1)

    def _as_numbers(self, part: Any) -> Any:
        """A part of an index, with numbers for known tensors that stand for one."""
        if isinstance(part, slice):
            return slice(*map(self.as_number, (part.start, part.stop, part.step)))
        return self.as_number(part)

    def as_number(self, part: Any) -> Any:
        """The number that a known integer tensor without axes holds; all else as it is."""
        number = self._ask(torch.Tensor.item, part) if is_place(part) else None
        return part if number is None else number


def _repeated_dims(mask: Any) -> tuple[int, ...]:
    """The sizes of the last dims of a mask along which it is expanded.

    `chosen[..., None].expand_as(x)` chooses whole rows, as `chosen` does.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool:
        return ()
    place = mask.dim()
    while place > 1 and type(mask.stride(place - 1)) is int and mask.stride(place - 1) == 0:
        place -= 1
    sizes = tuple(mask.shape[place:])
    return sizes if all(type(size) is int for size in sizes) else ()


def _geometry(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _rows(tensor: torch.Tensor, index: Any, dims: tuple[int, ...]) -> torch.Tensor:
    """What an index of rows chooses, element by element."""
    return tensor[index].flatten(0, len(dims))


def _set_rows(tensor: torch.Tensor, index: Any, dims: tuple[int, ...], value: torch.Tensor) -> None:
    tensor[index] = value.unflatten(0, (-1, *dims))


def _are_rows(tensor: torch.Tensor, index: Any, value: Any) -> bool:
    """Whether a value has an element for each that a mask chooses."""
    mask = index[0] if isinstance(index, tuple) else index
    is_full = isinstance(value, torch.Tensor) and value.dim() > tensor.dim() - mask.dim()
    return is_full and not (type(value.shape[0]) is int and value.shape[0] == 1)


_ROWS = {_get: _rows, _set: _set_rows}


@functools.cache
def _takes_numbers(name: str) -> bool:
    """Whether an operator takes no tensor but the first argument, as `view` and `topk` do.

    PyTorch takes tensors of one element for its other numbers.
    """
    if name in _ALSO_NUMBERS:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, OpOverloadPacket):
        return False
    overloads = [getattr(packet, overload)._schema for overload in packet.overloads()]
    others = [a.type for s in overloads for a in s.arguments[1:] if not a.is_out]
    return not any("Tensor" in str(kind) for kind in others)


def is_place(part: Any) -> bool:
    """Whether it is an integer tensor without axes."""
    return isinstance(part, torch.Tensor) and part.dim() == 0 and part.dtype in _INTEGERS


def _arguments(names: Sequence[str], args: Any, kwargs: Any) -> list[Any]:
    """Arguments of a call by name, None where one is not given."""
    return [*args, *(kwargs.get(name) for name in names[len(args) :])][: len(names)]
