"""What Python reads of a step's inputs while the step is captured, and when that holds again.

`if mask.any():` on an input has one answer for each batch, and a captured step has one side of the
branch. So the calls of torch that lead from inputs to what Python reads are written down on a tape.
Before a later call runs the captured step, the tape is run on its inputs, on the host: where Python
would read something else, another step is captured. So is what the step leaves in numbers that it
changes (`counted.py`).

This module must not know how a step is captured or run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._C import DisableTorchFunction

from mpxla.errors import CaptureError
from mpxla.graph.fakes import storage_of

__all__ = ["Decisions", "OfModelError", "Tape", "Written"]


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in the arguments of a call."""

    number: int


@dataclass(frozen=True)
class _Call:
    """One call of torch.

    Attributes:
        run: the function.
        args: its arguments, with slots for tensors.
        kwargs: likewise.
        results: slots of the leaves of its result; -1 for what is no tensor.
        reads: storages of its tensors.
        writes: storages of its results, and of arguments that it changes.
        where: for a read by Python, ` at file:line: source` of the user's line.
        answer: for a read by Python, what it has read.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    where: str | None = None
    answer: Any = None

    @cached_property
    def _is_flat(self) -> bool:
        """Whether no argument is a container."""
        given = (*self.args, *self.kwargs.values())
        return len(pytree.tree_leaves((self.args, self.kwargs))) == len(given) and not any(
            isinstance(value, (tuple, list, dict)) for value in given
        )

    def again(self, tensors: dict[int, torch.Tensor]) -> Any:
        """Calls it with other tensors, by slot, and keeps what it returns there."""

        def filled(value: Any) -> Any:
            return tensors[value.number] if isinstance(value, _Slot) else value

        if self._is_flat:  # pytree takes longer than the calls, which run for every microbatch
            args, kwargs = map(filled, self.args), {k: filled(v) for k, v in self.kwargs.items()}
        else:
            args, kwargs = pytree.tree_map(filled, (self.args, self.kwargs))
        result = self.run(*args, **kwargs)
        if len(self.results) == 1 and isinstance(result, torch.Tensor):
            tensors[self.results[0]] = result
            return result
        for slot, leaf in zip(self.results, pytree.tree_leaves(result), strict=True):
            if slot >= 0:
                tensors[slot] = leaf
        return result


@dataclass(frozen=True)
class Decisions:
    """Everything that Python has read of the inputs of one captured step.

    Attributes:
        calls: the calls that lead there, and the reads among them, in order.
        leaves: slot -> position among the tensor leaves of the step's inputs.
        constants: slot -> a tensor that no call makes.
        left: name of a place -> what the step leaves there, with a slot for what is computed.
    """

    calls: tuple[_Call, ...]
    leaves: dict[int, int]
    constants: dict[int, torch.Tensor]
    left: dict[str, Any] = field(default_factory=dict)

    def follow(self, inputs: Sequence[torch.Tensor]) -> tuple[str | None, dict[str, Any]]:
        """What Python would read otherwise with these inputs, in words; None if nothing.

        And what the step leaves in places then, by name.

        Args:
            inputs: tensor leaves of one microbatch, on the host.
        """
        tensors = {slot: inputs[leaf].detach().clone() for slot, leaf in self.leaves.items()}
        tensors |= {slot: value.clone() for slot, value in self.constants.items()}
        with torch.no_grad(), DisableTorchFunction():
            for call in self.calls:
                answer = call.again(tensors)
                if call.where is not None and not _same(answer, call.answer):
                    values = f" changed from {_short(call.answer)} to {_short(answer)}"
                    return f"what is read of the inputs{call.where}{values}", {}
        left = {
            name: tensors[value.number].item() if isinstance(value, _Slot) else value
            for name, value in self.left.items()
        }
        return None, left


class OfModelError(CaptureError):
    """A step leaves a number of the model's in a place of a name that is to be followed."""

    def __init__(self, name: str):
        super().__init__(
            f"The step function gives {name} a number that the model has computed. Make it a "
            f"buffer: register_buffer with a tensor, then self.name.copy_(value)."
        )
        self.name = name


@dataclass(frozen=True)
class Written:
    """What a capture has left in a place that it only writes, which may have no value."""

    value: Any


class Tape:
    """Writes down the calls of torch on values that are known while a step is captured."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []  # keeps them alive, so that ids stay their own
        self._calls: list[_Call] = []
        self._leaves: dict[int, int] = {}
        self._constants: dict[int, torch.Tensor] = {}
        self._left: dict[str, Any] = {}

    def begin_input(self, value: torch.Tensor, leaf: int) -> None:
        """Tells that calls will use this value of one of the step's tensor leaves."""
        self._leaves[self._slotted(value).number] = leaf

    def begin_constant(self, value: torch.Tensor) -> None:
        """Tells that calls will use a value that is the same in every call of the step."""
        self._constants[self._slotted(value).number] = value.clone()

    def add(
        self,
        call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
        result: Any,
        changed: Sequence[torch.Tensor],
        where: str | None = None,
    ) -> None:
        """One call.

        Args:
            call: function and arguments, with the values of tensors.
            result: what it has returned.
            changed: the arguments that it has written into.
            where: for a read by Python, the user's line as `at_user_line` gives it.
        """
        run, args, kwargs = call
        given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        leaves = pytree.tree_leaves(result)
        made = [v for v in leaves if isinstance(v, torch.Tensor)]
        args, kwargs = pytree.tree_map(self._slotted, (args, kwargs))
        slots = [self._slotted(v).number if isinstance(v, torch.Tensor) else -1 for v in leaves]
        reads, writes = _storages(given), _storages([*made, *changed])
        answer = None if where is None else result
        self._calls.append(_Call(run, args, kwargs, tuple(slots), reads, writes, where, answer))

    def leave(self, name: str, value: Any) -> None:
        """Tells what the step leaves in a place: a tensor that is known, or plain data."""
        self._left[name] = self._slotted(value)

    def _slotted(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._slots:
            self._slots[id(value)] = len(self._tensors)
            self._tensors.append(value)
        return _Slot(self._slots[id(value)])

    def decisions(self) -> Decisions | None:
        """What depends on the inputs of the step; None if Python has read and left none of it."""
        left = [self._tensors[v.number] for v in self._left.values() if isinstance(v, _Slot)]
        calls = self._leading_to(left)
        if not calls and not self._left:
            return None
        needed = _storages(left).union(*(call.reads for call in calls))

        def is_needed(slot: int) -> bool:
            return not needed.isdisjoint(_storages([self._tensors[slot]]))

        leaves = {slot: leaf for slot, leaf in self._leaves.items() if is_needed(slot)}
        constants = {slot: value for slot, value in self._constants.items() if is_needed(slot)}
        return Decisions(tuple(calls), leaves, constants, self._left)

    def _leading_to(self, left: Sequence[torch.Tensor]) -> list[_Call]:
        """The reads that depend on inputs, and the calls that they and `left` follow from."""
        depends = set(_storages([self._tensors[slot] for slot in self._leaves]))
        reads: set[int] = set()
        for place, call in enumerate(self._calls):
            if not depends.isdisjoint(call.reads):
                depends |= call.writes
                if call.where is not None:
                    reads.add(place)
        needed = set(_storages(left))
        chosen: list[_Call] = []
        for place in range(len(self._calls) - 1, -1, -1):
            call = self._calls[place]
            if place in reads or not needed.isdisjoint(call.writes):
                needed |= call.reads
                chosen.append(call)
        return chosen[::-1]


def _storages(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Memory of tensors; views share it."""
    return frozenset(map(storage_of, tensors))


def _same(one: Any, other: Any) -> bool:
    leaves, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    if len(leaves) != len(others):
        return False
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b)
        for a, b in zip(leaves, others, strict=True)
    )


def _short(answer: Any) -> str:
    text = " ".join(repr(answer).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
