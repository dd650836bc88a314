"""What a step function leaves in plain attributes that it reads: flags, counters, caches.

A capture runs the function once, and a program does not run Python. Numbers become inputs of the
step, in a second capture (`counted.py`). For the others, the function is captured again with what
the first capture has left, to see whether that matters:

    the same graph       a text for the log; it stays what it is, of which a warning tells
    another one, once    a flag (`if not self.initialized:`): the first program serves one
                         microbatch, those after it have the second
    another one again    the function computes with it: an error
    a missing tensor     a cache of tables, which captures do not keep: its attributes stay what
                         they were, and programs fill it

Where the function also branches on values of the model, numbers are treated as the others are.

This module must not know how steps are run.
"""

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from mpxla.errors import CaptureError
from mpxla.graph.alike import lines_of
from mpxla.graph.capture_attributes import (
    CONTAINERS,
    PLAIN_CONTAINERS,
    AttributeLog,
    Read,
    is_simple,
    kept,
    refusal,
)
from mpxla.graph.counted import Count, Counting, CountRead, as_count
from mpxla.graph.number import is_number
from mpxla.graph.plain import Change
from mpxla.graph.stepgraph import InputKind, StepGraph
from mpxla.graph.user_code import UndecidedError, ValueNeededError

__all__ = ["Attempt", "OnceRead", "PythonState", "restore"]

_FILLING = 0.5
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
    """

    step: StepGraph
    own_reads: list[Read]
    log: AttributeLog
    outer: list[Read]

    def changed(self) -> dict[str, Read]:
        """Plain values that it has read and changed, by name."""
        outer = [read for read in self.outer if _is_changed(read)]
        found = {read.name: read for read in (*self.log.changed(), *outer)}
        return {n: r for n, r in found.items() if n.rpartition(".")[2] not in _FOUND_AGAIN}

    def numbers(self, names: Collection[str]) -> dict[str, Read]:
        """Numbers that it has read, and changed, or that are among some names: inputs to be.

        Those of one name cannot be told apart.
        """
        counts = Counter(read.name for read in self.outer)
        found = {read.name: read for read in (*self.own_reads, *self.outer) if read.name in names}
        containers = (*self.outer, *(read for read, _ in self.log.filled()))
        entries = {entry.name: entry for read in containers for entry in _entries(read, names)}
        computed = self.computed()
        return {
            name: read
            for name, read in (found | self.changed() | entries).items()
            if as_count(name, read.value) and read.put is not None and counts[name] <= 1
            if not self.log.has_constants({name})  # it is of a cache
            and name not in computed
        }

    def left(self) -> list[Callable[[], None]]:
        """Put back what it has left of plain values."""
        outer = [partial(_put, read, read.now()) for read in self.outer if _is_changed(read)]
        return [*self.log.left(), *outer]

    def computed(self) -> dict[str, Read]:
        """Those to which it has given a number that the model computes, by name."""
        outer = {r.name: r for r in self.outer if is_number(r.now()) and is_simple(r.value)}
        return outer | self.log.computed()


@dataclass(frozen=True, eq=False)
class OnceRead(Read):
    """An attribute that the function reads and changes, once: its program is not used again."""

    def change(self) -> Change | None:
        """Always one, also where somebody has set the attribute back."""
        return Change(self.name, self.value, self.now())


def restore(log: AttributeLog, outer: Iterable[Read]) -> None:
    """Gives attributes and globals their plain values of before a capture."""
    log.restore()
    for read in outer:
        if _is_changed(read) and read.put is not None:
            read.put(read.value)


class PythonState:
    """Judges captures of one call.

    Args:
        outside: names of numbers that have changed outside of steps, which are inputs, too.

    Attributes:
        contents: gets containers that a capture reads, with what they hold before.
    """

    def __init__(self, outside: Collection[str] = ()) -> None:
        self._outside = outside
        self._left: list[Callable[[], None]] = []
        self._numbers: dict[str, Read] = {}
        self._may_count = True
        self.contents: list[tuple[Any, Any]] = []

    def stop_counting(self) -> None:
        """From here on no numbers are inputs."""
        self._numbers, self._may_count = {}, False

    @property
    def counts(self) -> tuple[Count, ...]:
        """The numbers that are inputs."""
        return Counting(self._numbers).counts

    def take(self) -> None:
        """Leaves in attributes what the last capture does, which is to be used."""
        for put in self._left:
            put()

    def judged(self, capture: Callable[[Counting], Attempt]) -> tuple[StepGraph, list[Read]]:
        """The step and what it reads; attributes are then what they were before.

        Args:
            capture: captures the step with attributes as they are, and some numbers as inputs.

        Raises:
            ValueNeededError: numbers are inputs, and the capture has no values of inputs.
            CaptureError: the step computes with a value that it changes, or reads tensors that it
                has left in a list or a dictionary.
        """
        try:
            return self._found(capture)
        finally:
            self.contents.clear()  # parameters cannot move while a copy has weak references

    def _found(self, capture: Callable[[Counting], Attempt]) -> tuple[StepGraph, list[Read]]:
        while self._may_count:
            try:
                first = capture(Counting(self._numbers))
            except (ValueNeededError, UndecidedError):
                raise
            except Exception:
                if not self._numbers:
                    raise
                self.stop_counting()
                self._refill()
                continue
            more = first.numbers(self._outside)
            if not more:
                return self._judged(first, lambda: capture(Counting(self._numbers)))
            is_cache = first.log.has_tensors and not _goes_on(lambda: capture(Counting()))
            restore(first.log, first.outer)
            self._refill()
            if is_cache:
                self.stop_counting()
            else:
                self._numbers |= more
        return self._judged(capture(Counting()), lambda: capture(Counting()))

    def _refill(self) -> None:
        """Gives containers what they held before captures."""
        for container, content in reversed(self.contents):
            _refill(container, content)
        self.contents.clear()

    def _judged(
        self, first: Attempt, capture: Callable[[], Attempt]
    ) -> tuple[StepGraph, list[Read]]:
        self._left = []
        changed, outer = first.changed(), [r for r in first.outer if not _is_changed(r)]
        reads = [*kept([*outer, *first.own_reads]), *map(CountRead.of, self._numbers.values())]
        computed = first.computed()
        if computed:
            _refuse_computed(first, computed, capture)
            reads += computed.values()
            changed = {name: read for name, read in changed.items() if name not in computed}
        left = first.left()
        try:
            once, counts = self._once(first, changed, capture) if changed else ([], set())
        except _CacheError:
            return first.step, [*reads, *changed.values()]
        finally:
            restore(first.log, first.outer)
        _refuse_carried(first, capture)
        if not once:
            first.log.warn(name for name in changed if name in counts)
        self._left = left
        return first.step, [*reads, *once]

    def _once(
        self, first: Attempt, changed: dict[str, Read], capture: Callable[[], Attempt]
    ) -> tuple[list[Read], set[str]]:
        """Reads of flags by which the step goes another way the next time, and counts."""
        try:
            second = capture()
        except Exception as error:  # it finds no tensors where it has put them
            raise _CacheError from error
        try:
            again = second.changed().keys() & changed.keys()
            if _is_same(first.step, second.step):
                return [], again
            if again:
                _refuse_counter(second, capture, min(again))
        finally:
            restore(second.log, second.outer)
        flags = [read for name, read in changed.items() if name not in again]
        if not flags or _outputs(first.step) == _outputs(second.step):
            return [], set(changed)
        if first.log.has_constants({read.name for read in flags}):
            raise _CacheError
        return [OnceRead(read.name, read.value, read.now) for read in flags], again


def _is_changed(read: Read) -> bool:
    """Whether something outside has changed that can be put back."""
    now = read.now()
    known = read.put is not None and is_simple(read.value) and is_simple(now)
    return known and read.change() is not None


def _goes_on(capture: Callable[[], Attempt]) -> bool:
    """Whether a step can go on with what it has left, though its tensors are not there."""
    try:
        again = capture()
    except Exception:  # of what is missing
        return False
    restore(again.log, again.outer)
    return True


def _put(read: Read, value: Any) -> None:
    assert read.put is not None, "it can be put back"
    read.put(value)


def _is_same(one: StepGraph, other: StepGraph) -> bool:
    return lines_of(one) == lines_of(other) and _outputs(one) == _outputs(other)


def _entries(read: Read, names: Collection[str]) -> list[Read]:
    """Numbers of a dictionary that have changed, or that are among some names."""
    now = read.now()
    if type(read.value) is not dict or type(now) not in PLAIN_CONTAINERS:
        return []

    def entry(key: Any, value: Any) -> Read:
        def put(new: Any) -> None:
            read.now()[key] = new

        return Read(f"{read.name}[{key!r}]", value, lambda: read.now().get(key), read.names, put)

    numbers = {k: v for k, v in read.value.items() if as_count("", v) and as_count("", now.get(k))}
    found = [entry(key, value) for key, value in numbers.items()]
    return [one for one in found if one.name in names or one.value != one.now()]


def _refuse_computed(
    first: Attempt, computed: dict[str, Read], capture: Callable[[], Attempt]
) -> None:
    """Captures with other numbers in the place of those that the model has computed.

    Raises:
        CaptureError: the step then is another one.
    """
    left = first.left()
    restore(first.log, first.outer)
    for name, read in computed.items():
        _put(read, type(read.value)(2 * (read.value or 0) + 3))
        is_same = _comes_again(first, capture)
        _put(read, read.value)
        if not is_same:
            raise CaptureError(
                f"The step function computes with {name}, and gives it a number that the model has "
                f"computed{first.log.line(name)}, by which the next microbatch would go. Make it a "
                f"buffer: register_buffer with a tensor, then self.name.copy_(value)."
            )
    for put in left:
        put()
    for read in computed.values():
        _put(read, read.value)
    first.log.warn(computed)


def _comes_again(one: Attempt, capture: Callable[[], Attempt]) -> bool:
    """Whether a capture gives the same step; it may raise anything by what it finds."""
    try:
        again = capture()
        restore(again.log, again.outer)
        return _is_same(one.step, again.step)
    except Exception:
        return False


def _refuse_counter(second: Attempt, capture: Callable[[], Attempt], name: str) -> None:
    if _comes_again(second, capture):
        return
    raise CaptureError(
        f"The step function computes with {name}, and changes it{second.log.line(name)}. It is "
        f"captured once per program, so that the number would stay. Count in a buffer "
        f"(register_buffer with a tensor, then self.name += 1), by which it may compute and "
        f"branch; or change it outside of the step function, or pass it as an argument."
    )


def _refuse_carried(first: Attempt, capture: Callable[[], Attempt]) -> None:
    """Captures with other tensors in the place of those that the step has left in containers.

    Raises:
        CaptureError: the step then is another one.
    """
    outer = [(read, now) for read in first.outer if isinstance(now := read.now(), CONTAINERS)]
    fillings = [(read, now, _filled(now)) for read, now in (*first.log.filled(), *outer)]
    for read, left, filled in fillings:
        if filled is None or read.put is None:
            continue
        own = read.now()
        content = copy.copy(own)
        if own is left:
            _refill(own, filled)
        else:
            read.put(filled)
        is_same = _comes_again(first, capture)
        if own is left:
            _refill(own, content)
        else:
            read.put(own)
        if not is_same:
            raise refusal(read.name, "")


def _filled(container: Any) -> Any:
    """A container with other tensors in the place of those of a capture; None if it has none."""
    count = 0

    def other(leaf: Any) -> Any:
        nonlocal count
        if not isinstance(leaf, FakeTensor):
            return leaf
        count += 1
        return torch.full(tuple(map(int, leaf.shape)), _FILLING).to(leaf.dtype)

    found = pytree.tree_map(other, container)
    return found if count else None


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(content)


class _CacheError(Exception):
    """Attributes hold tensors beside the flag, and captures leave none: it is to stay as it was."""


def _outputs(step: StepGraph) -> list[Any]:
    """What outputs are computed of, and by what; constants of one shape count as the same."""
    digests: dict[fx.Node, tuple[bool, str]] = {}
    roles = step.roles

    def digest(node: fx.Node) -> tuple[bool, str]:
        value = node.meta.get("val")
        form = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else ""
        role = roles.get(node)
        if role is not None:
            is_constant = role.kind is InputKind.CONSTANT
            return is_constant, form if is_constant else f"{role.kind} {role.name} {role.index}"
        inputs = [digests[other] for other in node.all_input_nodes]
        if node.op != "output" and all(is_constant for is_constant, _ in inputs):
            return True, form
        leaves, _ = pytree.tree_flatten((node.args, node.kwargs))
        texts = [digests[v][1] if isinstance(v, fx.Node) else repr(v) for v in leaves]
        text = f"{node.target} {texts}"
        return False, hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    for node in step.graph.nodes:
        digests[node] = digest(node)
    return [(role, digests[node]) for node, role in step.ends]
