"""Calls with fixed shapes in the place of those whose shapes PyTorch takes from values.

Where masks and counts are known while a step is captured, so is what they choose. A tensor that
stands for one place (`table[t]`) is read by PyTorch, though its value changes no shape.
This module must not know how values are known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from mpxla.graph.number import NumberRead
from mpxla.graph.user_code import ValueNeededError, at_user_line

__all__ = ["FixedShapes"]

_SIZES = frozenset("arange empty full ones zeros".split())
"""They take numbers, and a tensor of one element for a number."""
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_get, _set = torch.Tensor.__getitem__, torch.Tensor.__setitem__


@dataclass(frozen=True, eq=False)
class _Copy:
    """A part of a tensor that PyTorch would share with it, and the tensor and the place.

    Both have been written to so often when it was taken.
    """

    part: torch.Tensor
    of: tuple[torch.Tensor, torch.Tensor]
    num_writes: tuple[int, int]
    where: str

    def is_apart(self) -> bool:
        """Whether one of both was written to since, which the other does not show."""
        return self.num_writes != (self.part._version, self.of[0]._version)


_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class FixedShapes:
    """Exchanges calls of one captured step.

    Args:
        ask: (function, value) -> what the function says of a tensor whose value is known; None of
            all else.
    """

    def __init__(self, ask: Callable[[Callable[[torch.Tensor], Any], Any], Any]):
        self._ask = ask
        self._copies: list[_Copy] = []

    def fixed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """The call to make in the place of one, mostly itself."""
        name = getattr(func, "__name__", "")
        if func is _get or func is _set:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(map(self._as_numbers, index))
            index = self._places_of_masks(index) if func is _get else index
            return self._indexed(func, (args[0], index, *args[2:]))
        if name == "masked_select":
            tensor, mask = _arguments(("input", "mask"), args, kwargs)
            shape = torch.broadcast_shapes(tensor.shape, mask.shape)
            places = self._ask(lambda mask: mask.broadcast_to(shape).nonzero(), mask)
            if places is not None:
                return _get, (tensor.broadcast_to(shape), places.unbind(1)), {}
        if name == "repeat_interleave":
            tensor, repeats, dim = _arguments(("input", "repeats", "dim"), args, kwargs)
            tensor, dim = (tensor.flatten(), 0) if dim is None else (tensor, dim)
            count = tensor.shape[dim]
            places = self._ask(lambda n: torch.arange(count).repeat_interleave(n), repeats)
            if places is not None:
                return torch.index_select, (tensor, dim, places), {}
        if name in _SIZES:
            args, kwargs = pytree.tree_map(self._as_number, (args, kwargs))
            args = tuple(NumberRead(v) if isinstance(v, FakeTensor) else v for v in args)
        return func, args, kwargs

    def check(self) -> None:
        """Refuses writes to `table[t]`, or to the table after `table[t]` was taken.

        Raises:
            ValueNeededError: there was one; `table[t]` is a copy here, and shared in PyTorch.
        """
        for copy in self._copies:
            if copy.is_apart():
                raise ValueNeededError(
                    f"A part of a tensor, at a place that is a tensor, is taken{copy.where}, and "
                    f"one of both is changed in place later, which would not reach the other. Give "
                    f"the place as a Python number, or take the part by torch.index_select."
                )

    def _places_of_masks(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        """An index with the places of known masks, which have a known number, for the masks."""
        found: list[Any] = []
        for part in index:
            if isinstance(part, list) and part and all(isinstance(v, bool) for v in part):
                part = [place for place, is_chosen in enumerate(part) if is_chosen]
            is_mask = isinstance(part, torch.Tensor) and part.dtype is torch.bool and part.dim()
            places = self._ask(torch.nonzero, part) if is_mask else None
            found += [part] if places is None else places.unbind(1)
        return tuple(found)

    def _as_numbers(self, part: Any) -> Any:
        """A part of an index, with numbers for known tensors that stand for one."""
        if isinstance(part, slice):
            return slice(*map(self._as_number, (part.start, part.stop, part.step)))
        return self._as_number(part)

    def _as_number(self, part: Any) -> Any:
        """The number that a known integer tensor without axes holds; all else as it is."""
        number = self._ask(torch.Tensor.item, part) if _is_place(part) else None
        return part if number is None else number

    def _indexed(self, func: Any, args: tuple[Any, ...]) -> _Call:
        """Reads and writes at a place that a tensor without axes tells: of it, there may be one."""
        tensor, index = args[:2]
        places = [i for i, part in enumerate(index) if _is_place(part)]
        others = [part for i, part in enumerate(index) if i not in places]
        if len(places) != 1 or not all(_is_simple(part) for part in others):
            return func, args, {}
        (at,) = places
        whole = (*index[:at], slice(None), *index[at + 1 :])
        axis = _axis(whole, at, tensor.dim())
        part = tensor[whole]
        place = index[at].long()
        place = torch.where(place < 0, place + part.shape[axis], place).reshape(1)
        if func is _set:
            of = [args[0], index[at], args[2]]
            self._copies = [
                c for c in self._copies if [*map(id, of)] != [*map(id, c.of), id(c.part)]
            ]
            value = args[2] if isinstance(args[2], torch.Tensor) else part.new_tensor(args[2])
            value = value.to(part.dtype).broadcast_to(part.select(axis, 0).shape).unsqueeze(axis)
            return torch.Tensor.index_copy_, (part, axis, place, value), {}

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            found = part.index_select(axis, place).squeeze(axis)
            writes, where = (found._version, tensor._version), at_user_line()
            self._copies.append(_Copy(found, (tensor, index[at]), writes, where))
            return found

        return taken, (tensor,), {}


def _axis(index: tuple[Any, ...], at: int, num_dims: int) -> int:
    """The axis of the result that a slice in an index of numbers, slices and the like makes."""
    taken = sum(part is not None and part is not Ellipsis for part in index)
    of_parts = {int: 0, slice: 1, type(None): 1, type(Ellipsis): num_dims - taken}
    return sum(of_parts[type(part)] for part in index[:at])


def _is_simple(part: Any) -> bool:
    return part is None or part is Ellipsis or type(part) in (int, slice)


def _is_place(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dim() == 0 and part.dtype in _INTEGERS


def _arguments(names: Sequence[str], args: Any, kwargs: Any) -> list[Any]:
    """Arguments of a call by name, None where one is not given."""
    return [*args, *(kwargs.get(name) for name in names[len(args) :])][: len(names)]
