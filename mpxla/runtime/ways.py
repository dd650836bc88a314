"""Microbatches of one call that go different ways through a step function.

Each way is a plan. Microbatches that go the same way run together, in one pass. Where a step writes
to buffers or parameters, a later microbatch reads what earlier ones have left, so that only
neighbours run together.

    decisions of microbatches    passes, nothing written    passes, something written
    A B A A                      A 0 2 3, B 1               A 0, B 1, A 2 3

This module must not know how a plan is made or run.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mpxla.log import warn_once
from mpxla.runtime.outputs import differ_in_form
from mpxla.runtime.plans.cache import Plan

__all__ = [
    "Pass",
    "change_of_answers",
    "problem_of_flags",
    "problem_of_ways",
    "split_into_passes",
    "warn_of_passes",
    "why_one_way",
]

_ADVICE = (
    "Use torch.where or a mask in place of the branch, or make the decision before the step "
    "function and pass it as an argument."
)


@dataclass(frozen=True)
class Pass:
    """What one plan runs of a call.

    Attributes:
        plan: the plan.
        microbatches: their numbers among those of the call, in order.
        tensors: tensor leaves of every microbatch of the call, as inputs of the plan; on the first
            pipeline rank.
    """

    plan: Plan
    microbatches: tuple[int, ...]
    tensors: Sequence[list[torch.Tensor]] = field(default=(), repr=False)


def split_into_passes(ways: Sequence[Plan], first: int) -> list[tuple[Plan, tuple[int, ...]]]:
    """Which plan runs which microbatches, in order; the first of them has this number."""
    numbers = range(first, first + len(ways))
    plans = list(dict.fromkeys(ways))
    if any(plan.cut.step.changed for plan in plans):
        groups = itertools.groupby(numbers, lambda number: ways[number - first])
        return [(plan, tuple(own)) for plan, own in groups]
    return [(plan, tuple(i for i in numbers if ways[i - first] is plan)) for plan in plans]


def problem_of_ways(plans: Sequence[Plan], num_replicas: int) -> str | None:
    """Why microbatches of one call cannot have these plans, known so far; None if they can."""
    steps = [plan.cut.step for plan in plans]
    if len({plan.signature.draws for plan in plans}) > 1:
        return "the ways draw other random numbers in Python"
    if any(plan.exchanges for plan in plans):
        return (
            "ranks exchange values while they run (sharded_data_parallel_degree, SyncBatchNorm, "
            "collectives), and all have to run the same programs"
        )
    if num_replicas > 1 and any(step.scaled_tables for step in steps):
        return "replicas scale rows of an embedding (max_norm) together after each of them"
    form = differ_in_form(steps)
    return None if form is None else f"the step function returns {form}"


def problem_of_flags(function: str, ways: Sequence[Plan]) -> str | None:
    """Why microbatches cannot have these plans, all of which were captured with the same flags.

    The flags are `requires_grad` of parameters. In PyTorch each microbatch begins with those that
    the one before it has left.
    """
    other: set[str] = set()
    for number, plan in enumerate(ways):
        flags = plan.cut.step.flags
        if lost := other - {name for name, flag in flags.items() if flag.is_early}:
            return (
                f"{function}: microbatch {number} begins with other requires_grad of parameters "
                f"than the call ({min(lost)}), since the step function leaves them changed. Let "
                f"it set them before it uses the parameters, in every microbatch, or set them back "
                f"at its end; or change them between step calls."
            )
        other -= flags.keys()
        other |= {name for name, flag in flags.items() if flag.is_other}
    return None


def why_one_way(reason: str) -> str:
    """The rest of an error's text, after what microbatches decide differently."""
    return (
        f"Microbatches of a call that go different ways through the step function run one way "
        f"after the other, and that is not possible here: {reason}. {_ADVICE}"
    )


def warn_of_passes(function: str, change: str, passes: Sequence[Pass]) -> None:
    """Tells the user, once for a step function."""
    plans = {one.plan.number for one in passes}
    more = " (it writes to buffers or parameters, so that only neighbours run together)"
    warn_once(
        f"passes of {function}",
        f"the microbatches of a call of step function {function.rpartition('.')[2]} go "
        f"{len(plans)} ways ({change}). The call runs in {len(passes)} passes, one after the "
        f"other{more if len(passes) > len(plans) else ''}, which is slower than in one. {_ADVICE}",
    )


def change_of_answers(plan: Plan, other: Plan | None) -> str:
    """Where two ways have other answers, in words."""
    own, others = plan.signature.answers or (), (other and other.signature.answers) or ()
    pairs = enumerate(zip(own, others, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), None)
    if place is None:
        return "what Python asks for"
    line = plan.cut.step.asked[place]
    return f"what Python asks for{line} changed from {own[place]} to {others[place]}"
