"""Steps that only tell what Python asks of them; see `answers.py`.

A question runs before the step that it is about, for several microbatches, and must leave no trace:
it writes nothing. So where it reads what the step writes to buffers, it holds for a microbatch only
when those before it have run. Batch norm in training writes running statistics that it does not
read.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import fx

from mpxla.delayed import is_delayed
from mpxla.graph.stepgraph import InputKind, OutputKind, StepGraph, is_random, with_ends

__all__ = ["as_question", "draws_alike", "state_read", "told_by_buffers"]

_aten = torch.ops.aten
_NORMS = (
    _aten._native_batch_norm_legit_functional.default,
    _aten._native_batch_norm_legit.default,
    _aten.native_batch_norm.default,
    _aten.batch_norm.default,
)
_TRAINING = 5
"""Place of the argument with which they read running statistics only to return new ones."""
_NEW_STATISTICS = 3
"""Place of the first of these among their results."""


def as_question(step: StepGraph) -> StepGraph:
    """A question that writes nothing; the graph changes in place."""
    kept = [(n, role) for n, role in step.ends if role.kind is OutputKind.RESULT and not role.name]
    return with_ends(step, kept, prints=(), looking=())


def state_read(question: StepGraph) -> set[str]:
    """Parameters and buffers by whose values a question answers."""
    return {role.name for n, role in question.roles.items() if role.name and _is_read(n)}


def told_by_buffers(
    question: StepGraph, value_of: Callable[[str], torch.Tensor | None]
) -> int | None:
    """The last answer of a question that reads only buffers with a value; else None."""
    values: list[torch.Tensor | None] = []
    for node, role in question.roles.items():
        value = value_of(role.name) if role.kind is InputKind.BUFFER else None
        if node.users and (value is None or value.is_meta or is_delayed(value)):
            return None
        values.append(value if node.users else None)
    with torch.no_grad():
        answers = fx.Interpreter(fx.GraphModule({}, question.graph)).run(*values)
    return answers[-1].item()


def _is_read(node: fx.Node) -> bool:
    for user in node.users:
        if user.target not in _NORMS or user.args[_TRAINING] is not True:
            return True
        if any(cast(int, result.args[1]) >= _NEW_STATISTICS for result in user.users):
            return True
    return False


def draws_alike(question: Sequence[fx.Graph], whole: Sequence[fx.Graph]) -> bool:
    """Whether a question draws the random numbers that the step draws.

    Args:
        question: graphs of its stages.
        whole: those of the step.
    """
    if not any(map(_drawn, question)):
        return True
    pairs = list(zip(question, whole, strict=False))
    if len(question) != len(whole):
        return False
    return all(_drawn(one) == _drawn(other)[: len(_drawn(one))] for one, other in pairs)


def _drawn(graph: fx.Graph) -> list[str]:
    """Calls that draw, in order: equal keys and places give equal numbers."""
    return [
        f"{node.target} {tuple(node.meta['val'].shape)} {node.meta['val'].dtype}"
        if isinstance(node.meta.get("val"), torch.Tensor)
        else f"{node.target}"
        for node in graph.nodes
        if node.op == "call_function" and is_random(node)
    ]
