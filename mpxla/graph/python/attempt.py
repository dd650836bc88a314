"""One capture of a step function, and what it has done with plain values outside of its graph.

This module must not know how captures are judged.
"""

import copy
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from mpxla.graph.alike import is_same_step
from mpxla.graph.containers import with_other_tensors
from mpxla.graph.python.attributes import AttributeLog, is_made
from mpxla.graph.python.container_state import (
    changed_entries,
    missing_entries,
    tensor_entries,
)
from mpxla.graph.python.counted import as_count
from mpxla.graph.python.left_numbers import RecordRead
from mpxla.graph.python.noted_contents import is_simple, left_again
from mpxla.graph.python.number import is_number
from mpxla.graph.python.plain import MISSING, Read, plain
from mpxla.graph.python.reach import Place
from mpxla.graph.stepgraph import StepGraph

__all__ = ["Attempt", "is_changed", "is_state", "restore", "stood_in"]

_FOUND_AGAIN = ("problem_type",)
"""Attributes that a function sets to what it would find again by the same inputs: losses of
transformers do. To capture all their classifiers twice would tell nothing."""


@dataclass(frozen=True)
class Attempt:
    """One capture.

    Attributes:
        step: the graph.
        own_reads: what it depends on of attributes, as far as it has not changed it.
        log: what it did with attributes.
        outer: what it names of globals and closures, but for those that are inputs.
        computed: places to which it has given numbers that the model computes, by name.
        given: those with numbers that follow from inputs alone.
        outside: places of globals, closures and such, with what they held before.
        left_plainly: copies of plain values and containers of them that it has changed, by name.
    """

    step: StepGraph
    own_reads: list[Read]
    log: AttributeLog
    outer: list[Read]
    computed: dict[str, RecordRead]
    given: dict[str, RecordRead]
    outside: list[Place]
    left_plainly: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        reads = [*self.changed().values(), *self.filled()]
        found = {read.name: read.now() for read in reads if read.name not in self.computed}
        left = {
            name: plain(value)
            for name, value in found.items()
            if not any(map(is_number, pytree.tree_leaves(value)))
        }
        object.__setattr__(self, "left_plainly", left)

    def changed(self) -> dict[str, Read]:
        """Plain values that it has read and changed, by name."""
        outer = [read for read in self.outer if is_changed(read)]
        found = {read.name: read for read in (*self.log.changed(), *outer)}
        return {n: r for n, r in found.items() if n.rpartition(".")[2] not in _FOUND_AGAIN}

    def beside_caches(self) -> bool:
        """Whether it has changed numbers where it has put constant tensors."""
        numbers = {n for n, read in self.changed().items() if as_count(n, read.now())}
        return self.log.has_constants(numbers)

    def numbers(self, names: Collection[str]) -> dict[str, Read]:
        """Numbers that it has read, and changed, or that are among some names: inputs to be.

        Those of one name cannot be told apart.
        """
        found = {read.name: read for read in (*self.own_reads, *self.outer) if read.name in names}
        entries = self.entries(names)
        entries = {name: read for name, read in entries.items() if as_count("", read.now())}
        known = self._told_apart(found | self.changed() | entries)
        return {name: read for name, read in known.items() if as_count(name, read.value)}

    def states(self, names: Collection[str]) -> dict[str, Read]:
        """What it has read of some names and is no number."""
        found = {read.name: read for read in (*self.own_reads, *self.outer) if read.name in names}
        found |= {name: read for name, read in self.entries(names).items() if name in names}
        return {n: r for n, r in self._told_apart(found).items() if is_state(r.value)}

    def entries(self, names: Collection[str] = ()) -> dict[str, Read]:
        """Others in containers that it has changed, or that are among some names."""
        containers = (*self.outer, *(read for read, _ in self.log.filled()))
        found = {entry.name: entry for read in containers for entry in changed_entries(read, names)}
        return {name: entry for name, entry in found.items() if name not in self.log.counted}

    def counted(self) -> dict[str, Read]:
        """Numbers that it has changed, and others in their containers: all count there."""
        found = self.numbers(())
        for read in (*self.outer, *(read for read, _ in self.log.filled())):
            entries = {entry.name: entry for entry in changed_entries(read, None)}
            if not found.keys().isdisjoint(entries):
                known = self._told_apart(entries)
                found |= {n: e for n, e in known.items() if as_count(n, e.value)}
        return found

    def begun(self) -> dict[str, Read]:
        """Places that have a number since the step has run, and had none."""
        found = self._told_apart(self.changed() | self.entries())
        return {n: r for n, r in found.items() if is_state(r.value) and as_count(n, r.now())}

    def states_changed(self) -> dict[str, Read]:
        """What it has read of plain values that are no numbers, and changed."""
        found = self._told_apart(self.changed() | self.entries())
        return {n: r for n, r in found.items() if is_state(r.value) and is_simple(r.now())}

    def places(self, names: Mapping[str, bool]) -> dict[str, RecordRead]:
        """Those of some names that it may read or write; said is whether they are lists."""
        containers = [*self.outer, *(read for read, _ in self.log.filled())]
        found = {r.name: r for r in (*self.outer, *self.log.places()) if r.name in names}
        for read in containers:
            found |= {entry.name: entry for entry in changed_entries(read, names.keys())}
            found |= {entry.name: entry for entry in tensor_entries(read)}
            found |= {e.name: e for e in missing_entries(read, names.keys() - found.keys())}
        known = self._told_apart(
            {n: r for n, r in found.items() if n in names and not names[n] and _is_open(r.value)}
        )
        places = {name: RecordRead.at(read) for name, read in known.items()}
        for read in containers:
            held = read.content
            if names.get(read.name) and isinstance(held, (list, deque)):
                places[read.name] = RecordRead(
                    read.name, copy.copy(held), lambda read=read: read.content, is_more=True
                )
        return places

    def filled(self) -> list[Read]:
        """Containers without tensors in which it has changed something."""
        reads = [read for read in (*self.outer, *self.own_reads) if read.change() is not None]
        kinds = (dict, list)
        return [
            r for r in reads if isinstance(r.value, kinds) and with_other_tensors(r.now()) is None
        ]

    def flags(self, names: Collection[str]) -> dict[str, Read]:
        """What it has changed of some names, where it can be followed."""
        changed = {name: read for name, read in self.changed().items() if name in names}
        known = {n: r for n, r in self._told_apart(changed).items() if is_simple(r.now())}
        return {n: r for n, r in known.items() if is_state(r.value)}

    def _told_apart(self, reads: dict[str, Read]) -> dict[str, Read]:
        """Those that something can be put into."""
        counts = Counter(read.name for read in self.outer)
        return {
            name: read
            for name, read in reads.items()
            if read.put is not None and counts[name] <= 1
            if not self.log.has_constants({name})  # it is of a cache
            and name not in self.computed
        }

    def left(self) -> list[Callable[[], None]]:
        """Put back what it has left of plain values, and objects and containers of them."""
        outer = [left_again(read.give, read.now()) for read in self.outer if is_changed(read)]
        return [*self.log.left(), *outer]


def stood_in(
    first: Attempt,
    capture: Callable[[Mapping[str, RecordRead]], Attempt],
    places: Mapping[str, RecordRead],
    refill: Callable[[], None],
) -> Attempt | None:
    """Another capture, with stand-ins in some places; None if that is another step.

    Or leaves other plain values: Python has gone by the stand-ins, which are no tensors.

    Args:
        first: the one without.
        capture: makes it.
        places: by name.
        refill: gives containers back what they held.
    """
    again = capture(places)
    left = {name: value for name, value in again.left_plainly.items() if name not in places}
    if any(first.left_plainly.get(name, MISSING) != value for name, value in left.items()):
        restore(again.log, again.outer)
        refill()
        return None
    is_in_place = any(read.is_in_place for read in places.values())  # also in the first one
    if is_same_step(first.step, again.step) and not is_in_place:
        return again
    restore(again.log, again.outer)
    refill()
    if not is_in_place and not any(one.has_tensors for one in first.step.recorded):
        return None
    lists = {name: r for name, r in places.items() if r.is_more or r.is_in_place}
    if any(read.is_more for read in lists.values()):
        # Of how many entries they have, the captures that are compared below would say the same.
        told = again
        if len(lists) < len(places):
            told = capture(lists)
            restore(told.log, told.outer)
            refill()
        if not is_same_step(first.step, told.step):
            return None
    # What is added to `total` is a result now, in the place of their sum; are other sums, too?
    other = capture({name: replace(read, offset=1.0) for name, read in places.items()})
    if is_same_step(again.step, other.step):
        return other
    restore(other.log, other.outer)
    refill()
    return None


def _is_open(value: Any) -> bool:
    return is_simple(value) or isinstance(value, torch.Tensor)


def restore(log: AttributeLog, outer: Iterable[Read]) -> None:
    """Gives attributes and globals their plain values of before a capture."""
    log.restore()
    for read in outer:
        if is_changed(read) and read.put is not None:
            read.put(read.value)


def is_state(value: Any) -> bool:
    """Whether a value can be one by which a function goes on, of which there are few."""
    return is_simple(value) and not as_count("", value)


def is_changed(read: Read) -> bool:
    """Whether something outside has changed that can be put back."""
    now = read.now()
    known = read.put is not None and is_simple(read.value) and (is_simple(now) or is_made(now))
    return known and read.change() is not None
