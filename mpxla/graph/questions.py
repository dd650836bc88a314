"""Steps that only tell what Python asks of them; see `answers.py`.

A question runs before the step that it is about, for all microbatches, and must leave no trace: it
writes nothing. So what it computes must not depend on what the step writes to buffers in earlier
microbatches. Batch norm in training writes running statistics that it does not read.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from mpxla.errors import CaptureError
from mpxla.graph.stepgraph import OutputKind, StepGraph, is_random

__all__ = ["as_question", "draws_alike"]

_aten = torch.ops.aten
_TRAINING = {
    _aten._native_batch_norm_legit_functional.default: 5,
    _aten._native_batch_norm_legit.default: 5,
    _aten.native_batch_norm.default: 5,
    _aten.batch_norm.default: 5,
}
"""Place of the argument with which they read no running statistics."""


def as_question(step: StepGraph) -> StepGraph:
    """A question that writes nothing; the graph changes in place.

    Raises:
        CaptureError: it reads what it would have written.
    """
    changed = step.changed
    pairs = zip(step.output_nodes, step.outputs, strict=True)
    kept = [(n, role) for n, role in pairs if role.kind is OutputKind.RESULT and not role.name]
    step.graph.output_node().args = (tuple(node for node, _ in kept),)
    step.graph.eliminate_dead_code()
    inputs = zip(step.placeholders, step.inputs, strict=True)
    read = {role.name for node, role in inputs if role.name in changed and _is_read(node)}
    if read:
        raise CaptureError(
            f"The step function branches{step.asked[-1]} on a value that depends on the model, and "
            f"on {', '.join(sorted(read))}, which earlier microbatches write to: the value cannot "
            f"be known before they have run. Use torch.where or a mask, or decide between steps."
        )
    return replace(step, outputs=tuple(role for _, role in kept), prints=(), looking=())


def _is_read(node: fx.Node) -> bool:
    for user in node.users:
        place = _TRAINING.get(user.target)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if place is None or user.args[place] is not True:
            return True
    return False


def draws_alike(question: Sequence[fx.Graph], whole: Sequence[fx.Graph]) -> bool:
    """Whether a question draws the random numbers that the step draws.

    Args:
        question: graphs of its stages.
        whole: those of the step.
    """
    pairs = list(zip(question, whole, strict=False))
    if len(question) != len(whole) and any(map(_drawn, (*question, *whole))):
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
