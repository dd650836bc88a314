"""A call of a step function on one rank, with the plans that run its microbatches.

This module must not know how ranks agree on a call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mpxla.graph.python.counted import as_count
from mpxla.graph.python.draws import Draw, Drawer, Sources
from mpxla.random_states import States
from mpxla.runtime.plans.cache import Plan
from mpxla.runtime.rewriting import problem_of_memory
from mpxla.runtime.signature import Signature, with_constants
from mpxla.runtime.ways import Pass, change_of_answers

__all__ = [
    "Call",
    "as_drawn",
    "as_inputs",
    "as_numbers",
    "counted",
    "draw_all",
    "left_flags",
    "problem_of_inputs",
    "trained_by",
    "what_differs",
    "with_draws",
]


@dataclass
class Call:
    """One call of a step function on this rank.

    Attributes:
        signature: as the first pipeline rank describes it.
        tensors: tensor leaves of every microbatch, on the first pipeline rank.
        objects: this rank's own objects among the arguments, by path; only a capture reads them.
        arguments: of the call, on later pipeline ranks.
        passes: what runs it, or the next part of it; empty until all that its microbatches need is
            captured.
        done: so many microbatches have run.
        end: so many have run after these passes, where what they write may decide which way later
            ones go; None if all have. On the first pipeline rank.
        ways: the plan of each microbatch, as far as there is one; on the first pipeline rank.
        plans: those of them, by number.
        answers: for a function that asks, those that are known for each microbatch; on the first
            pipeline rank.
        question: what runs next, to know more of them.
        wanted: the microbatch that the next capture is for, if that comes next; likewise.
        seed: from which the seeds of random programs are drawn.
        drawer: what a capture draws by.
        sources: generators of the user's that the function draws by; None if those are no inputs.
        generators: states that random numbers of Python come from; None for this rank's own.
        began: plain values that the function changes, by name, as they were before the call; on the
            first pipeline rank.
        states: the same before each microbatch, as far as they are known; likewise.
        left: the same after the last one; likewise.
        outside: names of numbers outside of the arguments that have changed since a capture.
    """

    signature: Signature
    tensors: list[list[torch.Tensor]]
    objects: dict[str, Any]
    arguments: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})
    passes: list[Pass] = field(default_factory=list)
    done: int = 0
    end: int | None = None
    ways: list[Plan | None] = field(default_factory=list)
    plans: dict[int, Plan] = field(default_factory=dict)
    answers: list[tuple[int, ...]] = field(default_factory=list)
    question: Pass | None = None
    wanted: int | None = None
    seed: int = 0
    drawer: Drawer | None = None
    sources: Sources | None = None
    generators: States | None = None
    began: dict[str, Any] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    left: dict[str, Any] = field(default_factory=dict)
    outside: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Of its function; functions of one name have other titles."""
        return self.signature.function.partition("#")[0]

    @property
    def is_last(self) -> bool:
        """Whether no microbatches are left after its passes."""
        num_next = sum(len(one.microbatches) for one in self.passes)
        return self.done + num_next == self.signature.num_microbatches

    @property
    def sample(self) -> list[list[torch.Tensor]]:
        """Tensor leaves of the microbatch that the next capture is for; none on later ranks."""
        return [] if self.wanted is None else [self.tensors[self.wanted]]


def with_draws(call: Call, draws: tuple[Draw, ...]) -> Call:
    """A call with random numbers among its inputs, the same for all microbatches."""
    drawer = Drawer(call.generators, call.sources)
    values = [drawer.draw(draw) for draw in draws]
    tensors = [[*leaves, *values] for leaves in call.tensors]
    return replace(call, signature=replace(call.signature, draws=draws), tensors=tensors)


def as_inputs(call: Call, plan: Plan) -> list[list[torch.Tensor]]:
    """The tensor leaves of every microbatch for a plan, with what the function draws and counts.

    Floats that the capture had to keep as constants are none of them.
    """
    drawn = as_drawn(call, plan)
    return [[*leaves, *counted(call, plan, number)] for number, leaves in enumerate(drawn)]


def counted(call: Call, plan: Plan, number: int) -> list[torch.Tensor]:
    """Numbers that a step changes, as they are before a microbatch if that is known."""
    state = call.states[number] if number < len(call.states) else {}
    values = [state.get(name, read.now()) for name, read in plan.counts.items()]
    counts = zip(plan.signature.counts, values, strict=True)
    return [count.tensor(v if as_count(count.name, v) == count else 0) for count, v in counts]


def as_drawn(call: Call, plan: Plan) -> list[list[torch.Tensor]]:
    """The same without what it counts."""
    constants = set(call.signature.numbers) - set(plan.signature.numbers)
    if constants:
        signature, tensors = with_constants(call.signature, call.tensors, constants)
        call = replace(call, signature=signature, tensors=tensors)
    draws = plan.signature.draws
    return with_draws(call, draws).tensors if draws else call.tensors


def draw_all(draws: tuple[Draw, ...], sources: Sources | None) -> None:
    """Draws as the function would, so that all ranks go on with other numbers."""
    if not draws:
        return
    drawer = Drawer(sources=sources)
    for draw in draws:
        drawer.draw(draw)
    drawer.commit()


def as_numbers(passes: Sequence[Pass]) -> list[tuple[int, list[int]]]:
    """Passes as they travel."""
    return [(one.plan.number, [*one.microbatches]) for one in passes]


def trained_by(passes: Sequence[Pass]) -> set[str]:
    """Parameters whose gradients passes compute."""
    stages = [stage for one in passes for stage in one.plan.cut.stages]
    return {parameter for stage in stages for parameter in stage.trained}


def left_flags(passes: Sequence[Pass]) -> dict[str, bool]:
    """What all passes of a call leave as `requires_grad` of parameters, by name."""
    steps = {i: one.plan.cut.step for one in passes for i in one.microbatches}
    found = [step.flags.items() for _, step in sorted(steps.items(), key=lambda pair: pair[0])]
    return {name: flag.value for flags in found for name, flag in flags}


def problem_of_inputs(passes: Sequence[Pass]) -> str | None:
    """What is wrong with the inputs of a call; see `IndexChecks` and `problem_of_memory`."""
    for one in passes:
        checks, signature = one.plan.runner.checks, one.plan.signature
        own = {number: one.tensors[number] for number in one.microbatches}
        problem = problem_of_memory(signature, one.plan.cut.step.rewritten, one.tensors)
        problem = problem or checks.problem_of_inputs(signature, own)
        if problem is not None:
            return problem
    return None


def what_differs(call: Call) -> str:
    """Which microbatches decide differently, and what; not all of them have one plan."""
    first, plan = next((i, plan) for i, plan in enumerate(call.ways) if plan is not None)
    other = next(i for i, way in enumerate(call.ways) if way is not plan)
    change = plan.change([as_inputs(call, plan)[other]])
    if change is not None:
        what = change[1]
    elif plan.is_once:
        what = next(str(read.change()) for read in plan.view.reads if read.change())
    else:
        what = change_of_answers(plan, call.ways[other])
    return f"{what}, from microbatch {first} to microbatch {other}"
