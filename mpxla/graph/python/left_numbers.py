"""Places where a step function leaves numbers of the model (`recorded.py`).

Attributes, globals, entries of dictionaries and lists, and what it appends to lists. A capture
finds them, and gives them back what they held. In another one they hold stand-ins, so that it shows
whether the step goes by them, and how one microbatch goes on from the one before it.

This module must not know how captures are judged.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn

from mpxla.graph.containers import open_results
from mpxla.graph.python.attributes import FEW_ELEMENTS, AttributeLog
from mpxla.graph.python.container_state import entry
from mpxla.graph.python.noted_contents import CONTAINERS, is_simple
from mpxla.graph.python.number import Number, is_number, text_without_value
from mpxla.graph.python.plain import MISSING, SIMPLE, Change, Read, refill
from mpxla.graph.python.recorded import (
    Before,
    Recorded,
    is_recordable,
    may_be_appended,
    parts_of,
    refuse_unrecordable,
)
from mpxla.graph.user_code import AgainError
from mpxla.log import warn_once

__all__ = ["MANY", "RecordRead", "StandIns", "is_plain_number", "may_go_on", "numbers_left"]

MANY = 419
"""So many stand-ins are in a list. Code that lets go of the oldest ones then does.

With one more it is a multiple of the numbers up to seven, and it is a prime: code that does
something every n-th time goes another way than with none or one.
"""


@dataclass(frozen=True, eq=False)
class RecordRead(Read):
    """A place that gets numbers of the model.

    Attributes:
        is_more: whether they are appended to what is there.
        is_in_place: whether it is a tensor that is written to.
        offset: something by which stand-ins differ.
        start: what microbatches go on from in the place of no number; MISSING if that is not known.
        recorded: what a microbatch leaves there.
        first: the same where it finds no number; None if that is not known.
    """

    is_more: bool = False
    is_in_place: bool = False
    offset: float = 0.0
    start: Any = MISSING
    recorded: Recorded | None = None
    first: Recorded | None = None

    def change(self) -> Change | None:
        """Whether the program cannot go on from what is there."""
        now = self.now()
        if self.is_more:
            is_known = type(now) is type(self.value)
        else:
            goes_on = self.recorded is not None and self.recorded.goes_on
            is_known = may_go_on(now) or not goes_on or self.first is not None
            is_known = is_known or self.start is not MISSING
        return None if is_known else Change(self.name, self.value, now)

    def leave(self, value: Any) -> None:
        """Puts what a call leaves there."""
        now = self.now()
        is_like = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
        if self.is_in_place and is_like and now.shape == value.shape:
            now.detach().copy_(value)
        elif self.put is not None and not self.is_more:
            self.put(value)

    def numbered(self, found: Recorded, later: Recorded) -> Recorded:
        """What a capture with stand-ins has found, and one without."""
        return found.numbered(later, len(self.value), MANY) if self.is_more else later

    def after(self, results: Sequence[Any], left: Mapping[str, Any]) -> Any:
        """What a microbatch leaves there, or appends; see `Recorded.of`."""
        if self.start is not MISSING and not may_go_on(left[self.name]):
            left = {**left, self.name: self.start}
        is_first = self.first is not None and not may_go_on(left[self.name])
        recorded = self.first if is_first else self.recorded
        assert recorded is not None, "it was captured"
        return recorded.of(results, left)


class LeftNumber(NamedTuple):
    """What a capture has left in a place."""

    read: RecordRead
    value: Any


def may_go_on(value: Any) -> bool:
    """Whether it is something that Python adds to: a number, a tensor, a text, an array."""
    return is_plain_number(value) or isinstance(value, (str, torch.Tensor, np.ndarray))


def is_plain_number(value: Any) -> bool:
    """Whether it is a number of Python."""
    return isinstance(value, (bool, int, float))


def numbers_left(
    log: AttributeLog,
    outer: Sequence[Read],
    contents: Sequence[tuple[Any, Any]],
    is_known: Callable[[torch.Tensor], bool],
    is_constant: Callable[[torch.Tensor], bool],
    filled_once: Collection[str] = (),
) -> tuple[list[LeftNumber], dict[str, RecordRead]]:
    """What a step function has left, when it has run; places then are what they were.

    Also places with numbers that follow from inputs alone, which may be followed (`counted.py`).

    Args:
        log: what it did with attributes.
        outer: what it names of globals and closures.
        contents: containers, with copies of what they held.
        is_known: says whether a value follows from inputs alone.
        is_constant: says whether it is the same in every call.
        filled_once: names of lists by which the step goes, to which it appends.
    """
    held = {id(container): before for container, before in contents}
    found = [_of(read, last) for read, last in log.numbers_left()]
    for read in outer:
        now = read.now()
        is_open = is_simple(read.value) or isinstance(read.value, torch.Tensor)
        if read.put is not None and is_open and is_recordable(now, with_tensors=True):
            found.append(_of(read, now))
        found += _in_container(read, held, log.counted, with_tensors=True)
    for read, _ in log.filled():  # tensors of modules are carried, or caches
        with_tensors = log.is_of_object(read.name)
        found += _in_container(read, held, log.counted, with_tensors)
    counts = Counter(one.read.name for one in found)
    left: list[LeftNumber] = []
    given: dict[str, RecordRead] = {}
    for one in found:
        leaves = [*chain.from_iterable(map(parts_of, pytree.tree_leaves(open_results(one.value))))]
        numbers = [leaf for leaf in leaves if is_number(leaf)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if one.read.is_more and one.read.name in filled_once and not numbers:
            continue
        is_filled = not isinstance(one.read.value, torch.Tensor) and not one.read.is_more
        if is_filled and any(map(is_constant, tensors)):  # as of caches
            continue
        if one.read.name in log.counted or counts[one.read.name] > 1:  # which cannot be told apart
            continue
        is_followed = not tensors and all(is_known(number.tensor) for number in numbers)
        if one.read.is_more or not is_followed:
            left.append(one)
            _put_back(one.read)
            _warn_of_large(one.read.name, tensors)
        elif is_number(one.value):
            given[one.read.name] = one.read
    return left, given


def _warn_of_large(name: str, tensors: Sequence[torch.Tensor]) -> None:
    largest = max((tensor.numel() for tensor in tensors), default=0)
    if largest > FEW_ELEMENTS:
        warn_once(
            f"large tensor in {name}",
            f"the step function leaves a tensor of {largest} elements in {name}. All ranks of a "
            f"pipeline get it in every call, which waits for it: leave less there if nobody reads "
            f"it.",
        )


def _of(read: Read, value: Any, is_more: bool = False) -> LeftNumber:
    return LeftNumber(RecordRead.at(read, is_more=is_more), value)


def _in_container(
    read: Read, held: Mapping[int, Any], counted: Collection[str], with_tensors: bool = False
) -> list[LeftNumber]:
    now = read.now()
    before = held.get(id(now))
    if before is None:
        return []
    if not isinstance(now, dict):
        # Where entries are inputs, a full deque does not tell these from what was appended.
        has_inputs = any(name.startswith(f"{read.name}[") for name in counted)
        more = [] if has_inputs and len(before) == len(now) else _appended(before, now)
        if more is None:
            return []
        if more:
            refuse_unrecordable(read.name, more)
            whole = Read(read.name, before, read.now, read.names)
            return [_of(whole, more, is_more=True)] if may_be_appended(more, with_tensors) else []
    found: list[LeftNumber] = []
    for key, value in now.items() if isinstance(now, dict) else enumerate(now):
        old = before.get(key, MISSING) if isinstance(before, dict) else before[key]
        part = entry(read, key, old)
        make = _maker(now, value, with_tensors) if old is MISSING else None
        if make is not None:
            raise AgainError(part.name, partial(_enter, now, key, make))
        if isinstance(value, CONTAINERS) and value is old:
            found += _in_container(part, held, counted, with_tensors)
        elif value is not old and _is_plain(old):
            refuse_unrecordable(part.name, value)
            if is_recordable(value, with_tensors):
                found.append(_of(part, value))
    return found


def _maker(container: Any, value: Any, with_tensors: bool) -> Callable[[], Any] | None:
    """What makes a new entry of a dictionary that every microbatch goes on with, if it is one."""
    if type(value) is list:
        is_new = getattr(container, "default_factory", None) is list and may_be_appended(value)
        return list if value and (is_new or is_recordable(value, with_tensors)) else None
    if type(container) is Counter:
        return int if isinstance(value, int) else None
    is_object = not isinstance(value, (*SIMPLE, *CONTAINERS, torch.Tensor, Number))
    return getattr(container, "default_factory", None) if is_object else None


def _enter(container: dict[Any, Any], key: Any, make: Callable[[], Any]) -> None:
    """Makes an entry to which every microbatch adds."""
    container[key] = make()


def _is_plain(value: Any) -> bool:
    """Whether a value is plain data."""
    kinds = (*SIMPLE, torch.Tensor)
    return is_simple(value) or all(isinstance(leaf, kinds) for leaf in pytree.tree_leaves(value))


def _appended(before: Sequence[Any], now: Any) -> list[Any] | None:
    """What was put at the end of a list or deque, which may be full; None if more has changed."""
    given, held = list(before), list(now)
    is_full = getattr(now, "maxlen", None) == len(held)
    for count in range(len(held) + 1) if is_full else [len(held) - len(given)]:
        kept = held[: len(held) - count]
        if count >= 0 and len(kept) <= len(given):
            pairs = zip(kept, given[len(given) - len(kept) :], strict=True)
            if all(one is other for one, other in pairs):
                return held[len(kept) :]
    same = len(held) == len(given)
    return [] if same else None


def _put_back(read: RecordRead) -> None:
    if read.is_more:
        refill(read.now(), read.value)
    else:
        read.give(read.value)


class StandIns:
    """Puts stand-ins into places while a step is captured, and sees what is left there.

    Args:
        reads: the places, by name.

    Attributes:
        left: what the last capture has left in those that it has changed.
    """

    def __init__(self, reads: Mapping[str, RecordRead]):
        self._reads = reads
        self._given: dict[str, Any] = {}
        self.left: list[LeftNumber] = []

    def begin(self, model: nn.Module) -> None:
        """Before the function runs; the model says nothing of values."""
        # What follows from a parameter is known to nobody: to go by it is an error.
        some = next((p for p in model.parameters() if p.numel()), None)
        for name, read in self._reads.items():
            value = torch.full((), read.offset, dtype=torch.float64)
            if some is not None:
                value = value + some.detach().reshape(-1)[0].double()
            stand_in, now = Before(name, value), read.now()
            is_tensor = isinstance(now, torch.Tensor)
            if read.is_more:
                now.extend([stand_in] * MANY)
                self._given[name] = list(now)
            elif is_plain_number(now) or now is None or now is MISSING or is_tensor:
                self._given[name] = stand_in
                read.give(stand_in)
            elif isinstance(now, str):
                self._given[name] = text_without_value("text", stand_in, "")
                read.give(self._given[name])
            elif isinstance(now, (*CONTAINERS, tuple)):  # another one is to be put there
                given = pytree.tree_map(lambda _, value=value: Before(None, value), now)
                self._given[name] = given
                read.give(given)

    def end(self) -> None:
        """After it, also where it has raised: places are what they were."""
        self.left = []
        for name, read in self._reads.items():
            now, given = read.now(), self._given.pop(name, read.value)
            if read.is_more:
                more = _appended(given, now)
                if more and may_be_appended(more, with_tensors=True):
                    self.left.append(LeftNumber(read, more))
            elif now is not given:
                self.left.append(LeftNumber(read, now))
            _put_back(read)
