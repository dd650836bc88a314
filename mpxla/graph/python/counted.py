"""Plain values outside of its arguments that a step function changes, and how it goes on by them.

A counter (`self.num_calls += 1`), or a temperature that is annealed, in the step or between steps.
While the step is captured, such a number has no value (`number.py`). What Python decides by it is
read as that of other inputs is, and so is what the step leaves there (`decisions.py`): every
microbatch is given what the one before it has left. Others keep their values in a capture, and
there is a program for each: flags (`self.flip = not self.flip`), texts, and attributes that are not
there yet. What a function only writes that counts is left there, too.

This module must not know how a step is captured or run.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from mpxla.graph.python.decisions import Written
from mpxla.graph.python.number import NumberRead
from mpxla.graph.python.plain import Change, Read

__all__ = [
    "Count",
    "CountRead",
    "Counting",
    "FollowedRead",
    "LeftRead",
    "StateRead",
    "WrittenRead",
    "as_count",
]

_DTYPES = {int: torch.int64, float: torch.float64}
_LARGEST = 2**62


@dataclass(frozen=True)
class Count:
    """A number that is an input.

    Attributes:
        name: of its place, for the user.
        dtype: int64 or float64.
    """

    name: str
    dtype: torch.dtype

    def tensor(self, value: float) -> torch.Tensor:
        """A value of it, of shape []."""
        return torch.tensor(value, dtype=self.dtype)

    def __str__(self) -> str:
        return self.name


def as_count(name: str, value: Any) -> Count | None:
    """The input for a value; None for what is no number, or a large one."""
    dtype = _DTYPES.get(type(value))
    is_large = dtype is torch.int64 and abs(value) > _LARGEST
    return None if dtype is None or is_large else Count(name, dtype)


@dataclass(frozen=True, eq=False)
class FollowedRead(Read):
    """A place whose value is known before every microbatch: a change is none to others."""

    def change(self) -> Change | None:
        """Never one."""
        return None

    def serves(self, value: Any) -> bool:
        """Whether the program can be used with a value there."""
        return True


class CountRead(FollowedRead):
    """A place whose number is an input."""


class LeftRead(FollowedRead):
    """A place that is only written."""


@dataclass(frozen=True, eq=False)
class WrittenRead(Read):
    """A place that every call gives the same plain value, and that no step reads.

    Attributes:
        left: the value.
        is_of_tensors: whether other microbatches may leave tensors there, which steps carry.
    """

    left: Any = None
    is_of_tensors: bool = False

    def change(self) -> None:
        """Never one."""

    def leave(self) -> None:
        """Gives the place its value, in the place of what a script has put there meanwhile."""
        now = self.now()
        if type(now) is not type(self.left) or now != self.left:
            self.give(self.left)


class StateRead(FollowedRead):
    """A place whose value is that of the capture."""

    def serves(self, value: Any) -> bool:
        """Whether it is the same."""
        return type(value) is type(self.value) and value == self.value


class Counting:
    """Puts numbers without values into places while a step is captured, and sees what is left.

    Args:
        reads: the places, by name; each can be put back.

    Attributes:
        counts: the inputs, in order.
        left: what the last capture has left in places that it has changed, by name.
    """

    def __init__(self, reads: Mapping[str, FollowedRead] | None = None):
        self._reads = dict(reads or {})
        numbers = {n: read for n, read in self._reads.items() if isinstance(read, CountRead)}
        found = [as_count(name, read.now()) for name, read in numbers.items()]
        assert None not in found, "they are places of numbers"
        self.counts = tuple(count for count in found if count is not None)
        self._before = {name: read.now() for name, read in self._reads.items()}
        self._given: dict[str, NumberRead] = {}
        self.left: dict[str, Any] = {}

    @property
    def values(self) -> list[torch.Tensor]:
        """What the inputs are when the step is captured."""
        return [count.tensor(self._before[count.name]) for count in self.counts]

    @property
    def names(self) -> Set[str]:
        """Of the places."""
        return self._reads.keys()

    def begin(self, leaves: Sequence[torch.Tensor]) -> None:
        """Before the function runs.

        Args:
            leaves: the inputs for these numbers.
        """
        for count, leaf in zip(self.counts, leaves, strict=True):
            self._given[count.name] = NumberRead(leaf)
            self._reads[count.name].give(self._given[count.name])

    def end(self) -> None:
        """After it, also where it has raised: places are what they were."""
        for name, before in self._before.items():
            read = self._reads[name]
            now = read.now()
            if name not in self._given or now is not self._given.pop(name):
                self.left[name] = Written(now) if isinstance(read, LeftRead) else now
            read.give(before)
