"""Indices that are tensors without dims: `x[i]`, `table[t] = row`, `scores[b, labels[b]]`.

PyTorch reads such an index as a number, and gives a view of the place. A captured step has no
numbers; what is at the place is copied by operators that take the tensor. A write into the copy,
which PyTorch's view would pass on, is an error.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mpxla.errors import CaptureError
from mpxla.graph.python.counts import Counts
from mpxla.graph.python.number import is_number
from mpxla.graph.user_code import ValueNeededError, at_user_line

__all__ = ["Selected", "as_torch_reads", "is_same"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_aten = torch.ops.aten
_Places = dict[int, torch.Tensor]
"""Indices without dims by the dim that they select from."""


@dataclass(frozen=True)
class _Copy:
    """What was read at places, and from where."""

    value: torch.Tensor
    tensor: torch.Tensor
    num_writes: tuple[int, int]
    parts: tuple[Any, ...]
    line: str
    is_slice: bool = False

    def is_apart(self) -> bool:
        """Whether one of the two was written to since, which the other does not show."""
        return self.num_writes != (self.value._version, self.tensor._version)

    def is_at(self, tensor: torch.Tensor, parts: tuple[Any, ...]) -> bool:
        is_place = tensor is self.tensor and not self.is_slice
        return is_place and all(map(is_same, parts, self.parts))

    def is_by(self, tensor: torch.Tensor, index: Any) -> bool:
        """Whether it was read by these very slices, as `x[:n] += y` does."""
        pairs = zip(_parts(index), self.parts, strict=False)
        is_place = tensor is self.tensor and self.is_slice
        return is_place and all(one is other for one, other in pairs)


class Selected:
    """Answers `__getitem__` and `__setitem__` with such indices while a step is captured.

    Args:
        call: calls a function of torch with arguments and keyword arguments.
        as_number: gives the number of a part of an index, where it is known; else the part.
        is_known: whether the value of a tensor is.
        counts: of rows that masks choose.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        as_number: Callable[[Any], Any],
        is_known: Callable[[torch.Tensor], bool],
        counts: Counts,
    ):
        self._call, self._as_number, self._is_known = call, as_number, is_known
        self._counts = counts
        self._copies: list[_Copy] = []
        self._masks: dict[Any, torch.Tensor] = {}
        self.ends: Any = WeakTensorKeyDictionary()

    def get(self, tensor: torch.Tensor, index: Any) -> torch.Tensor:
        """What is at an index."""
        chosen = self._with_places(tensor, index)
        if chosen is not index:
            found = self._call(torch.Tensor.__getitem__, (tensor, chosen), {})
            return self._noted(found, tensor, _parts(index), is_slice=True)
        parts, places, rest = self._taken_apart(index, tensor.dim())
        if not places:
            return self._call(torch.Tensor.__getitem__, (tensor, index), {})
        found = self._call(_aten.index.Tensor, (tensor, _indices(places)), {})
        found = self._noted(found, tensor, parts)
        return self._call(torch.Tensor.__getitem__, (found, rest), {}) if rest else found

    def by_mask(self, tensor: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
        """What a mask in an index chooses, where PyTorch gives a view."""
        found = self._call(torch.Tensor.__getitem__, (tensor, index), {})
        return self._noted(found, tensor, index, is_slice=True)

    def _noted(
        self, found: torch.Tensor, tensor: torch.Tensor, parts: Any, is_slice: bool = False
    ) -> torch.Tensor:
        num_writes = found._version, tensor._version
        self._copies.append(_Copy(found, tensor, num_writes, parts, at_user_line(), is_slice))
        return found

    def _with_places(self, tensor: torch.Tensor, index: Any) -> Any:
        """An index with places, or a mask, in the place of one slice between unknown numbers."""
        parts = _parts(index)
        if any(isinstance(part, (torch.Tensor, list)) for part in parts):
            return index
        width, dim = tensor.dim() - sum(map(_num_dims, parts)), 0
        chosen = list(parts)
        for place, part in enumerate(parts):
            if isinstance(part, slice) and part.step in (None, 1):
                chosen[place] = self._without_unknown_ends(part, tensor.shape[dim])
            dim += width if part is ... else _num_dims(part)
        changed = [place for place, part in enumerate(parts) if chosen[place] is not part]
        # Two indices that are tensors would be read as places, one by one.
        is_one = sum(isinstance(chosen[place], torch.Tensor) for place in changed) <= 1
        return tuple(chosen) if changed and is_one else index

    def _without_unknown_ends(self, part: slice, size: Any) -> Any:
        """What stands for a slice of a dim, an end of which, or the size, Python cannot read."""
        counts = self._counts
        start, stop = self._as_number(part.start), self._as_number(part.stop)
        ends = [end for end in (start, stop) if end is not None]
        are_unknown = any(map(is_number, ends)) or any(map(self._has_no_value, ends))
        if not are_unknown and not any(map(counts.is_of_masks, (*ends, size))):
            return part
        is_first = start is None or (type(start) is int and start == 0)
        if is_first and (stop is None or (counts.is_of_masks(size) and _expr(stop) == _expr(size))):
            return slice(None) if counts.is_of_masks(size) else part
        most = counts.most(stop)
        if is_first and most is not None and type(size) is int and most <= size:
            return self._call(torch.arange, (stop,), {})  # as many as a mask has chosen
        key = tuple(map(_expr, (size, start, stop)))
        if None in key:
            return self.between(size, counts.number_of(start), counts.number_of(stop))
        if key not in self._masks:  # one, so that rows of several tensors meet
            found = self.between(size, counts.number_of(start), counts.number_of(stop))
            self._masks[key] = found
        return self._masks[key]

    def _has_no_value(self, end: Any) -> bool:
        return _is_place(end) and not self._is_known(end)

    def between(self, size: Any, start: Any, stop: Any) -> torch.Tensor:
        """The mask of a slice; negative ends count from the last place."""
        places = self._call(torch.arange, (size,), {})
        found = self._call(torch.ge, (places, 0), {})
        for end, compare in ((start, torch.ge), (stop, torch.lt)):
            if end is not None:
                end = end.tensor if is_number(end) else end
                end = self._call(torch.as_tensor, (end,), {})
                counted = self._call(torch.add, (end, size), {})
                is_negative = self._call(torch.lt, (end, 0), {})
                end = self._call(torch.where, (is_negative, counted, end), {})
                passed = self._call(compare, (places, end), {})
                found = self._call(torch.logical_and, (found, passed), {})
        self.ends[found] = size, start, stop
        return found

    def set(self, tensor: torch.Tensor, index: Any, value: Any) -> None:
        """Writes to an index. `x[i] += y` reads, changes the copy, and writes it."""
        chosen = self._with_places(tensor, index)
        if chosen is not index:
            self._copies = [copy for copy in self._copies if not copy.is_by(tensor, index)]
            return self._call(torch.Tensor.__setitem__, (tensor, chosen, value), {})
        parts, places, rest = self._taken_apart(index, tensor.dim())
        if not places or any(isinstance(part, (torch.Tensor, Sequence)) for part in rest):
            return self._call(torch.Tensor.__setitem__, (tensor, index, value), {})
        self._copies = [copy for copy in self._copies if not copy.is_at(tensor, parts)]
        if rest:
            others = [dim for dim in range(tensor.dim()) if dim not in places]
            view = self._call(torch.permute, (tensor, (*places, *others)), {})
            index = (*(slice(None) for _ in places), *rest)
            tensor = self._call(torch.Tensor.__getitem__, (view, index), {})
            places = dict(enumerate(places.values()))
        value = value.tensor if is_number(value) else value
        if isinstance(value, torch.Tensor):
            value = self._call(torch.Tensor.to, (value, tensor.dtype), {})
            extra = range(max(0, value.dim() - tensor.dim() + len(places)))
            value = self._call(torch.squeeze, (value, tuple(extra)), {})
        else:
            value = self._call(torch.full, ((), value), {"dtype": tensor.dtype})
        self._call(_aten.index_put_.default, (tensor, _indices(places), value), {})

    def _taken_apart(
        self, index: Any, num_dims: int
    ) -> tuple[tuple[Any, ...], _Places, tuple[Any, ...]]:
        """The parts of an index; of them those without dims, and the others."""
        parts = tuple(map(self._as_number, _parts(index)))
        places: _Places = {}
        rest: list[Any] = []
        dim, width = 0, num_dims - sum(map(_num_dims, parts))
        for part in parts:
            if _is_place(part):
                places[dim] = part
            else:
                rest.append(part)
            dim += width if part is ... else _num_dims(part)
        return parts, places, tuple(rest)

    def check(self) -> None:
        """Looks at what was read, when the step function has run.

        Raises:
            CaptureError: some of it was changed in place, or what it was read from.
        """
        for copy in self._copies:
            if copy.is_apart():
                kind, what = CaptureError, "an index that is a tensor without dims"
                if copy.is_slice:  # its ends may be known
                    kind, what = ValueNeededError, "a slice that ends at a value"
                raise kind(
                    f"The step function changes in place what it has read{copy.line} by {what}, "
                    f"or later the tensor that it was read from. PyTorch gives a view there, and "
                    f"a captured step a copy: write x[i] = value or x[i] += value, and read x[i] "
                    f"after the last write."
                )


def as_torch_reads(index: Any) -> Any:
    """An index, with a tuple for a list that PyTorch takes for one: `x[[rows, columns]]`."""
    if not isinstance(index, Sequence) or isinstance(index, tuple) or len(index) >= _LONG:
        return index
    is_tuple = any(part is None or part is ... or isinstance(part, _ARE_PARTS) for part in index)
    return tuple(index) if is_tuple and _LISTS_ARE_TUPLES else index


_LONG = 32
"""So long lists are always tensors."""
_ARE_PARTS = (torch.Tensor, np.ndarray, Sequence, slice)


def _lists_are_tuples() -> bool:
    """Whether this PyTorch does so, which it says a later one will not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.zeros(1, 1)[[[0], [0]]].dim() == 1


_LISTS_ARE_TUPLES = _lists_are_tuples()


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _expr(number: Any) -> Any:
    """Equal for numbers of rows that are computed alike; None for what has to be computed."""
    if isinstance(number, torch.SymInt):
        return number.node.expr
    return str(number) if type(number) in (int, NoneType) else None


def is_same(one: Any, other: Any) -> bool:
    """Whether two parts of an index are one, or equal ends."""
    return one is other or (type(one) is type(other) in (int, slice) and one == other)


def _is_place(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dim() == 0 and part.dtype in _INTEGERS


def _num_dims(part: Any) -> int:
    """How many dims of a tensor a part of an index stands for; an ellipsis is not counted."""
    if part is None or part is ... or isinstance(part, bool):
        return 0
    is_mask = isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.dim() if is_mask else 1


def _indices(places: _Places) -> list[torch.Tensor | None]:
    return [places.get(dim) for dim in range(max(places) + 1)]
