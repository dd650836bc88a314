"""The plans of a pipeline, by what they were made for; the least recently used ones are dropped.

Every rank keeps the same plans under the same numbers, since all of them see the same calls.
This module must not know how a plan is made or run.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from mpxla.graph.python.counted import CountRead, FollowedRead, WrittenRead, as_count
from mpxla.graph.python.held_objects import ObjectRead
from mpxla.graph.python.left_numbers import RecordRead
from mpxla.graph.python.numbers_of_ways import DecidingRead, LeftNamesRead
from mpxla.graph.python.questions import state_read
from mpxla.graph.python.state import OnceRead
from mpxla.log import get_logger
from mpxla.runtime.model_watch import ModelView
from mpxla.runtime.plans.cut import CutStep
from mpxla.runtime.signature import Signature

__all__ = ["MAX_PLANS", "Plan", "Plans"]

MAX_PLANS = 64
"""So many programs of step functions are kept."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A compiled step and what it holds for.

    Attributes:
        number: announces the plan to the other ranks of a pipeline.
        signature: of the calls that it serves.
        view: what the model was when the step was captured.
        runner: runs it.
        to_host: gives tensors of any device on the host.
        exchanges: what ranks that hold parameters together have to do alike in it, in lines.
    """

    number: int
    signature: Signature
    view: ModelView
    runner: Any
    to_host: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    exchanges: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """Of the exchanges."""
        return hashlib.blake2b("\n".join(self.exchanges).encode(), digest_size=16).hexdigest()

    @cached_property
    def key(self) -> Signature:
        """Of the signature, whatever Python draws and is told."""
        return self.signature.of_arguments.key

    @property
    def cut(self) -> CutStep:
        """The step in stages."""
        return self.runner.plan.cut

    @property
    def is_question(self) -> bool:
        """Whether it only tells what Python asks for (`graph/python/answers.py`)."""
        return self.cut.step.is_question

    @cached_property
    def is_once(self) -> bool:
        """Whether it serves one microbatch, and what Python has left then decides otherwise."""
        return any(isinstance(read, OnceRead) for read in self.view.reads)

    @cached_property
    def counts(self) -> dict[str, CountRead]:
        """Places of numbers that the step changes, by name."""
        return {read.name: read for read in self.view.reads if isinstance(read, CountRead)}

    @cached_property
    def followed(self) -> dict[str, FollowedRead]:
        """All places that are followed from one microbatch to the next, by name."""
        return {read.name: read for read in self.view.reads if isinstance(read, FollowedRead)}

    @cached_property
    def objects(self) -> list[ObjectRead]:
        """Objects whose attributes the step reads."""
        return [read for read in self.view.reads if isinstance(read, ObjectRead)]

    @cached_property
    def records(self) -> list[RecordRead]:
        """Places that get numbers of the model."""
        return [read for read in self.view.reads if isinstance(read, RecordRead)]

    @cached_property
    def written(self) -> list[WrittenRead]:
        """Places that get the same value in every call."""
        return [read for read in self.view.reads if isinstance(read, WrittenRead)]

    @cached_property
    def asks_of(self) -> set[str]:
        """Parameters and buffers by which it answers, if it is a question."""
        return state_read(self.cut.step) if self.is_question else set()

    @cached_property
    def deciding(self) -> set[str]:
        """Places with plain values that ways of the function leave, and by which this one goes."""
        return {read.name for read in self.view.reads if isinstance(read, DecidingRead)}

    @cached_property
    def num_places(self) -> int:
        """How many places in which ways of the function leave something are known to it."""
        known = (read.value for read in self.view.reads if isinstance(read, LeftNamesRead))
        return next(known, 0)

    def goes_by(self, plan: "Plan") -> set[str]:
        """What another plan writes to, or leaves in Python, and this one goes by."""
        left = {read.name for read in plan.records}
        return (self.asks_of & plan.cut.step.changed) | (left & self.deciding)

    def change(self, tensors: Sequence[Sequence[torch.Tensor]]) -> tuple[int, str] | None:
        """(microbatch, what Python would read otherwise) of a call; None if nothing."""
        for microbatch, leaves in enumerate(tensors):
            change, _ = self.follow(leaves)
            if change is not None:
                return microbatch, change
        return None

    def follow(self, leaves: Sequence[torch.Tensor]) -> tuple[str | None, dict[str, Any]]:
        """What Python would read otherwise in one microbatch, and what it leaves if nothing."""
        decisions = self.cut.step.decisions
        return (None, {}) if decisions is None else decisions.follow(self.to_host(leaves))


class Plans:
    """All plans that are known; `to_host` gives tensors of any device on the host."""

    def __init__(self, to_host: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = list):
        self._to_host = to_host
        self._limit = MAX_PLANS
        self._by_number: OrderedDict[int, Plan] = OrderedDict()
        self._by_key: dict[Any, list[Plan]] = {}
        self._count = 0

    def __iter__(self) -> Iterator[Plan]:
        return iter(self._by_number.values())

    def __len__(self) -> int:
        return len(self._by_number)

    def find(
        self, signature: Signature, view: ModelView, tensors: Sequence[Sequence[torch.Tensor]]
    ) -> list[Plan | None]:
        """The plan for each microbatch of a call, with the model as it is; one if one serves."""
        same = self._same(signature, view)
        for plan in same:
            if plan.change(tensors) is None:
                return [plan] * len(tensors)
        return [
            next((plan for plan in same if plan.change([leaves]) is None), None)
            for leaves in tensors
        ]

    def like(self, signature: Signature, view: ModelView) -> list[Plan]:
        """Plans for such calls, whatever Python draws and is told; the last that was used first."""
        key = signature.of_arguments.key
        own = [plan for plan in self if plan.key == key and plan.view.difference(view) is None]
        return own[::-1]

    def changed_outside(self, signature: Signature) -> frozenset[str]:
        """Names of what is followed, and of numbers that have changed since such calls' captures.

        Whatever else has changed.
        """
        key = signature.of_arguments.key
        reads = [r for plan in self if plan.key == key for r in plan.view.reads]
        changes = filter(None, (read.change() for read in reads if not isinstance(read, OnceRead)))
        numbers = [c.name for c in changes if as_count("", c.before) and as_count("", c.now)]
        followed = (read.name for read in reads if isinstance(read, FollowedRead))
        return frozenset((*numbers, *followed))

    def inputs_change(
        self, signature: Signature, view: ModelView, tensors: Sequence[Sequence[torch.Tensor]]
    ) -> str | None:
        """What has changed in the inputs since the last plan for such a call, if there is one."""
        same = self._same(signature, view)
        change = same[-1].change(tensors) if same else None
        return None if change is None else change[1]

    def _same(self, signature: Signature, view: ModelView) -> list[Plan]:
        plans = self._by_key.get(signature.key, ())
        return [plan for plan in plans if plan.view.difference(view) is None]

    def model_change(self, signature: Signature, view: ModelView) -> str | None:
        """What has changed in the model since the last plan for such a call, if there is one."""
        key = _without_flags(signature)
        same = [plan for plan in self if _without_flags(plan.signature) == key]
        return same[-1].view.difference(view) if same else None

    def use(self, number: int) -> Plan:
        """A plan by its number; it is the last that will be dropped."""
        self._by_number.move_to_end(number)
        return self._by_number[number]

    def add(
        self,
        signature: Signature,
        view: ModelView,
        runner: Any,
        exchanges: Sequence[str] = (),
    ) -> Plan:
        """Keeps a plan under the next number; may drop another one."""
        plan = Plan(self._count, signature, view, runner, self._to_host, tuple(exchanges))
        self._by_number[plan.number] = plan
        self._by_key.setdefault(signature.key, []).append(plan)
        self._count += 1
        while len(self._by_number) > self._limit:
            _, dropped = self._by_number.popitem(last=False)
            same = self._by_key[dropped.signature.key]
            same.remove(dropped)
            if not same:
                del self._by_key[dropped.signature.key]
            get_logger().info(
                "dropped a program of step function %s: %d are kept, and this one was not used for "
                "longest",
                dropped.signature.function.rpartition(".")[2],
                self._limit,
            )
        return plan


def _without_flags(signature: Signature) -> Signature:
    """What a call is, whatever the model is: other modules have other flags."""
    return replace(signature, modes="", trainable="", counts=()).key
