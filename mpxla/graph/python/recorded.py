"""Numbers of the model that a step function leaves in Python, to be seen when it has run.

    self.last = loss.item()                      what the last microbatch gives
    self.total += loss.item()                    every microbatch adds to it
    losses.append(round(loss.item(), 4))         one more for each
    lines.append(f"{loss.item():.4f}")           texts
    seen["first"] = output.detach()              tensors, in globals, closures and objects
    total += loss.detach()                       which Python may add up

While the step is captured they have no values. What `.item()` has read becomes results of the step,
and how Python goes on from there is written down (`number.py`): when the step has run, it is
computed once more for each microbatch, in order. The step itself must not go by what is left there,
which `state.py` sees to.

This module must not know how a step is captured or run, nor where things are left.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from mpxla.errors import CaptureError
from mpxla.graph.containers import holds_numbers, is_open, open_results
from mpxla.graph.python.arrays import array_of
from mpxla.graph.python.number import Later, NumberRead, is_number, values_in
from mpxla.graph.python.plain import PLAIN

__all__ = [
    "Before",
    "Recorded",
    "Recording",
    "is_recordable",
    "may_be_appended",
    "parts_of",
    "refuse_unrecordable",
]


class Before(NumberRead):
    """Stands for what is in a place before a microbatch, which the step must not go by.

    Without the name of a place, nothing that is left may be computed of it either.
    """

    def __init__(self, name: str | None, tensor: torch.Tensor):
        super().__init__(tensor)
        self.name, self.is_before = name, name is not None


@dataclass(frozen=True)
class _Result:
    """A number, or a tensor, that is a result of the step."""

    place: int
    is_tensor: bool = False


@dataclass(frozen=True)
class _Left:
    """What is in a place before a microbatch."""

    name: str


@dataclass(frozen=True)
class _Computed:
    """What a function of Python makes of terms."""

    function: Callable[..., Any]
    terms: tuple[Any, ...]


@dataclass(frozen=True)
class Recorded:
    """What one microbatch leaves in a place.

    Attributes:
        name: of the place.
        terms: plain data, and terms in the places of numbers.
        structure: what holds these.
    """

    name: str
    terms: tuple[Any, ...]
    structure: pytree.TreeSpec

    @classmethod
    def of_value(
        cls, name: str, value: Any, term: Callable[[Any], Any] = lambda leaf: leaf
    ) -> Self:
        """`term` gives what is in the place of a leaf."""
        leaves, structure = pytree.tree_flatten(open_results(value))
        return cls(name, tuple(map(term, leaves)), structure)

    @classmethod
    def as_before(cls, name: str) -> Self:
        """What stays as it is."""
        return cls.of_value(name, _Left(name))

    @property
    def goes_on(self) -> bool:
        """Whether it depends on what was there before."""
        return any(map(_has_left, self.terms))

    @property
    def is_plain(self) -> bool:
        """Whether it has no numbers of the model."""
        return all(_plain_of(term) is term for term in self.terms)

    @property
    def has_tensors(self) -> bool:
        """Whether tensors are among its results."""
        return any(map(_has_tensor, self.terms))

    @property
    def places(self) -> list[int]:
        """Its results, among those of the step that are recorded."""
        return sorted(set(chain.from_iterable(map(_places_in, self.terms))))

    def numbered(self, other: "Recorded", length: int, more: int) -> "Recorded":
        """Goes by the length of a list where another capture, with `more` in it, does.

        So does `log.append((len(log), loss.item()))`.
        """
        if self.structure != other.structure:
            return other

        def term(one: Any, another: Any) -> Any:
            if not type(one) is type(another) is int or another - one != more:
                return another
            return _Computed(lambda held: len(held) + one - length, (_Left(self.name),))

        return replace(self, terms=tuple(map(term, self.terms, other.terms)))

    def is_like(self, other: "Recorded") -> bool:
        """Whether the plain data beside the numbers is that of another capture."""
        own, others = ([*map(_comparable, recorded.terms)] for recorded in (self, other))
        return own == others

    def of(self, results: Sequence[Any] | Mapping[int, Any], left: Mapping[str, Any]) -> Any:
        """The value.

        Args:
            results: the tensors of these among the step's results, at least those of `places`.
            left: what is in places before the microbatch, by name.
        """

        def value(term: Any) -> Any:
            if isinstance(term, _Result):
                found = results[term.place]
                return found if term.is_tensor else found.item()
            if isinstance(term, _Left):
                return left[term.name]
            if isinstance(term, np.ndarray):
                return term.copy()  # each time another one, as the step would make it
            return term.function(*map(value, term.terms)) if isinstance(term, _Computed) else term

        return pytree.tree_unflatten(map(value, self.terms), self.structure)


class Recording:
    """Writes down what one capture leaves, and which numbers of the step that takes.

    Args:
        left: name of a place -> what is left there, or a list of what is appended.
    """

    def __init__(self, left: Mapping[str, Any] | None = None) -> None:
        self._places: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []
        self.recorded = tuple(
            Recorded.of_value(name, value, self._term)
            for name, value in sorted((left or {}).items())
        )

    @property
    def results(self) -> list[torch.Tensor]:
        """What the step has to return, of shape []."""
        return [tensor.detach().clone() for tensor in self._tensors]

    def returned(self, leaf: Any) -> Any:
        """A leaf that a step function returns; what Python makes of numbers is recorded.

        Texts with numbers and arrays; numbers by themselves, and tensors, are results.
        """
        if is_number(leaf) or isinstance(leaf, torch.Tensor) or not is_open(leaf):
            return leaf
        made = Recorded.of_value("", leaf, self._term)
        if made.goes_on:
            raise TypeError("the step function returns what is made when it has run")
        return made

    def _term(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return self._result(value, value, is_tensor=True)
        if isinstance(value, str):
            parts = values_in(value)
            filled = partial(_filled, value, [(part, spec) for part, _, spec in parts])
            return _Computed(filled, tuple(self._term(v) for _, v, _ in parts)) if parts else value
        if holds_numbers(value):
            made = partial(_array_of_numbers, value.shape)
            return _Computed(made, tuple(map(self._term, value.flat)))
        if isinstance(value, Later):
            function, of = value.made_by
            return _Computed(function, tuple(map(self._term, of)))
        if not is_number(value):
            return value
        if issubclass(type(value), Before):
            if value.name is None:
                raise value.needed("what it leaves")
            return _Left(value.name)
        if value.made_by is not None:
            function, of = value.made_by
            return _Computed(function, tuple(map(self._term, of)))
        return self._result(value, value.tensor)

    def _result(self, value: Any, tensor: torch.Tensor, is_tensor: bool = False) -> _Result:
        if id(value) not in self._places:
            self._places[id(value)] = len(self._tensors)
            self._tensors.append(tensor)
        return _Result(self._places[id(value)], is_tensor)


def parts_of(leaf: Any) -> Iterator[Any]:
    """Numbers and tensors that what is left is made of; or what it is, if it is no more."""
    parts: Sequence[Any] = ()
    if isinstance(leaf, str):
        parts = [value for _, value, _ in values_in(leaf)]
    elif isinstance(leaf, Later):
        parts = leaf.made_by[1]
    elif holds_numbers(leaf):
        parts = [*leaf.flat]
    for part in parts:
        yield from parts_of(part)
    if not parts:
        yield leaf


def is_recordable(value: Any, with_tensors: bool = False) -> bool:
    """Whether it is plain data with numbers of the model in it, or with its tensors."""
    return may_be_appended(value, with_tensors) and any(map(is_open, _leaves(value)))


def _leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(open_results(value))


def _array_of_numbers(shape: tuple[int, ...], *values: Any) -> np.ndarray:
    return np.array(values).reshape(shape)


def _filled(text: str, parts: Sequence[tuple[str, str]], *values: Any) -> str:
    """A text with values in the places of what stands for them."""
    for (part, spec), value in zip(parts, values, strict=True):
        text = text.replace(part, format(value, spec))
    return text


def may_be_appended(value: Any, with_tensors: bool = False) -> bool:
    """Whether it is plain data, with numbers (or tensors) of the model or without."""
    return all(_may_be_appended(leaf, with_tensors) for leaf in _leaves(value))


def _may_be_appended(leaf: Any, with_tensors: bool) -> bool:
    if isinstance(leaf, FakeTensor):
        return with_tensors
    return isinstance(leaf, (*PLAIN, np.ndarray)) or is_open(leaf)


def refuse_unrecordable(name: str, value: Any) -> None:
    """Raises CaptureError where numbers are left in a place beside what is no plain data."""
    leaves = _leaves(value)
    others = [leaf for leaf in leaves if not _may_be_appended(leaf, with_tensors=True)]
    if others and any(is_open(leaf) and not isinstance(leaf, FakeTensor) for leaf in leaves):
        raise CaptureError(
            f"The step function leaves what the model has computed in {name}, beside an object of "
            f"type {type(others[0]).__name__}. It has no value while a step is captured, and comes "
            f"there when the step has run, with plain data only. Leave the object out, or return "
            f"the number and put both there after the step call."
        )


def _plain_of(term: Any) -> Any:
    return None if isinstance(term, (_Result, _Left, _Computed)) else term


def _comparable(term: Any) -> Any:
    return term.tolist() if isinstance(term, np.ndarray) else _plain_of(term)


def _places_in(term: Any) -> Iterable[int]:
    if isinstance(term, _Computed):
        return chain.from_iterable(map(_places_in, term.terms))
    return [term.place] if isinstance(term, _Result) else []


def _has_left(term: Any) -> bool:
    if isinstance(term, _Computed):
        return any(map(_has_left, term.terms))
    return isinstance(term, _Left)


def _has_tensor(term: Any) -> bool:
    if isinstance(term, _Computed):
        return term.function is not array_of and any(map(_has_tensor, term.terms))
    return isinstance(term, _Result) and term.is_tensor
