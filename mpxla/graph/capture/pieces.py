"""Tensors that values divide into pieces, and pieces that are joined again.

    pieces = x.split(counts.tolist())           rows between two ends, which masks choose
    torch.cat([f(p) for p, f in ...])           all rows again, as many as `x` has

    torch.cat([f(x[s:e]) for s, e in ...])      likewise, where each begins at the end of another

as in layers of experts whose rows are sorted by expert. Without the second, joined pieces would
have as many rows as masks choose, and would meet nothing of a known size. This module must not know
how rows are chosen.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpxla.graph.capture.selects import Selected, is_same
from mpxla.graph.python.counts import Counts
from mpxla.graph.python.number import is_number
from mpxla.graph.user_code import at_user_line

__all__ = ["Joins", "Pieces"]

_SIZES = {"split": ("split_size_or_sections", "split_size"), "split_with_sizes": ("split_sizes",)}
_ENDS = {"tensor_split": ("indices", "tensor_indices_or_sections", "indices_or_sections")}
_JOINS = frozenset(("cat", "concat", "concatenate"))


@dataclass(frozen=True)
class _Division:
    """Masks of the pieces of a dim, in their order; all of its places are in one of them."""

    sizes: tuple[Any, ...]
    length: int
    masks: tuple[torch.Tensor, ...]


@dataclass
class Joins:
    """What is known of slices that are joined, from one capture of a step to the next.

    Attributes:
        are_open: whether there are some of which it is not known that they have all rows.
        are_whole: whether they are supposed to have, since the step cannot be captured if not.
    """

    are_open: bool = False
    are_whole: bool = False


class Pieces:
    """Answers calls that divide and join while a step is captured.

    Args:
        call: calls a function of torch with arguments and keyword arguments.
        selected: reads what is between ends.
        counts: of rows that masks choose.
        joins: of slices.

    Attributes:
        joined: the user's lines where slices are supposed to have all rows, and whether they have.
    """

    def __init__(
        self, call: Callable[..., Any], selected: Selected, counts: Counts, joins: Joins
    ) -> None:
        self._call, self._selected, self._counts = call, selected, counts
        self._joins = joins
        self.joined: list[tuple[str, torch.Tensor]] = []
        self._divisions: list[_Division] = []

    def takes(self, func: Any) -> bool:
        """Whether a function divides or joins."""
        name = getattr(func, "__name__", "")
        return name in _SIZES or name in _ENDS or (name in _JOINS and self._has_pieces)

    @property
    def _has_pieces(self) -> bool:
        return bool(self._divisions or self._selected.ends)

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call of a function that is taken gives, if it goes by values; else None."""
        name = func.__name__
        if name in _JOINS:
            values, *rest = args or (kwargs["tensors"],)
            return self._joined(values, *rest, **{k: v for k, v in kwargs.items() if k == "dim"})
        names = _SIZES.get(name) or _ENDS[name]
        given = [*args[1:2], *(kwargs[name] for name in names if name in kwargs)]
        sizes = given[0] if given else None
        tensor = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        if isinstance(sizes, torch.Tensor) and sizes.dim() == 1:
            sizes = self._call(torch.Tensor.tolist, (sizes,), {})
        if not isinstance(sizes, Sequence) or not isinstance(tensor, torch.Tensor):
            return None
        sizes = tuple(map(self._counts.number_of, sizes))
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % tensor.dim()
        if not any(map(is_number, sizes)) or type(tensor.shape[dim]) is not int:
            return None
        is_by_ends = name in _ENDS
        division = self._division(sizes, tensor.shape[dim], is_by_ends)
        before = [slice(None)] * dim
        return tuple(self._selected.by_mask(tensor, (*before, mask)) for mask in division.masks)

    def _division(self, sizes: tuple[Any, ...], length: int, are_ends: bool) -> _Division:
        for known in self._divisions:
            # One, so that pieces of several tensors meet.
            if known.length == length and len(known.sizes) == len(sizes):
                if all(map(is_same, known.sizes, sizes)):
                    return known
        # Where sizes do not add up to the length, PyTorch raises.
        ends = sizes if are_ends else tuple(itertools.accumulate(sizes))[:-1]
        pairs = zip((None, *ends), (*ends, None), strict=True)
        masks = tuple(self._selected.between(length, *pair) for pair in pairs)
        self._divisions.append(_Division(sizes, length, masks))
        return self._divisions[-1]

    def _joined(self, values: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
        """All pieces of a division one after the other, as one tensor; None of anything else."""
        values = tuple(values)
        if len({value.dim() for value in values}) != 1 or len({v.dtype for v in values}) != 1:
            return None
        dim %= values[0].dim()
        masks = [self._counts.mask_of_size(value.shape[dim]) for value in values]
        slices = self._slices(masks)
        for known in [*self._divisions, *slices]:
            if len(known.masks) == len(masks) and all(map(is_same, known.masks, masks)):
                # Rows are written along the first dim only.
                rows = [self._call(torch.movedim, (value, dim, 0), {}) for value in values]
                shape = known.length, *rows[0].shape[1:]
                made = self._call(torch.Tensor.new_zeros, (rows[0], shape), {})
                for mask, own in zip(known.masks, rows, strict=True):
                    self._call(torch.Tensor.__setitem__, (made, mask, own), {})
                return self._call(torch.movedim, (made, 0, dim), {})
        return None

    def _slices(self, masks: Sequence[torch.Tensor | None]) -> list[_Division]:
        """What is divided into slices that are joined; at most one."""
        ends = [self._selected.ends.get(mask) for mask in masks if mask is not None]
        known = [found for found in ends if found is not None]
        if len(known) < max(len(masks), 1) or type(length := known[0][0]) is not int:
            return []
        if any(other != length for other, *_ in known):
            return []
        starts = [0 if start is None else start for _, start, _ in known]
        stops = [length if stop is None else stop for *_, stop in known]
        pairs = zip((*starts, length), (0, *stops), strict=True)
        others = [(one, other) for one, other in pairs if not is_same(one, other)]
        if others and not self._joins.are_whole:
            self._joins.are_open = True
            return []
        pair: tuple[Any, Any]
        for pair in others:
            one, other = (torch.as_tensor(v.tensor if is_number(v) else v) for v in pair)
            self.joined.append((at_user_line(), self._call(torch.eq, (one, other), {})))
        return [_Division((), length, tuple(mask for mask in masks if mask is not None))]
