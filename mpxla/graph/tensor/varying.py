"""Which values of a step vary over the ranks that share its tensors, and where gradients cross.

Modules whose weights are split say where partial results become equal on all ranks again
(`collectives.sum_over`, `gather_parts`). The other direction follows from that: where something
equal meets something that varies, each rank finds only its part of the gradient of what is equal.
`mark_varying` puts `vary` there, whose derivative is the sum over the ranks:

    hidden (equal) ----+---------------+------> residual          before: three products of one
                       +- q  k  v (varying)                       equal value

    hidden (equal) ----+-- vary --+-----------> residual          after: one `vary`, and so one sum
                                  +- q  k  v                      of gradients for all of them

So parameters that are whole on all ranks (a norm inside of an attention's heads, say) get whole
gradients, whatever module uses them. What could only be wrong is refused: results, losses and
buffers that would differ between the ranks. (The rule is that of JAX's `shard_map`, where types say
what varies.)

This module must not know how a backend communicates.
"""

from collections.abc import Collection

import torch
from torch import fx

from mpxla.errors import CaptureError
from mpxla.graph.collectives import CROSS_ENTROPY, GATHER, OWN_PART, SUM, TENSOR_GROUP, VARY
from mpxla.graph.stepgraph import InputKind, OutputKind, StepGraph, describe, is_random

__all__ = [
    "VARYING",
    "draws_for_part",
    "gathered_parameters",
    "mark_varying",
    "split_parameters",
]

VARYING = "mpxla_varying"
"""Key in the `meta` of nodes whose values vary over a group: (index, size) of the rank in it."""


def mark_varying(step: StepGraph, split: Collection[str], index: int, size: int) -> StepGraph:
    """Makes gradients of equal values whole, in place, and marks nodes that vary.

    What varies and is random draws other numbers on each rank, see `stage/parts.py`.

    Args:
        step: as captured with the shards of this rank.
        split: names of the parameters and buffers of which this rank has a shard.
        index: this rank's place in the group.
        size: ranks of the group.

    Raises:
        CaptureError: the step would return a loss, a result or a new buffer that differs between
            the ranks.
    """
    held = (InputKind.PARAMETER, InputKind.BUFFER)
    varying = {n for n, role in step.roles.items() if role.kind in held and role.name in split}
    starting = (VARY, OWN_PART)
    if not varying and not any(n.target in starting for n in step.graph.nodes):
        return step
    for node in varying:
        node.meta[VARYING] = index, size
    crossings: dict[fx.Node, fx.Node] = {}
    for node in list(step.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (CROSS_ENTROPY, GATHER, SUM):
            _check_varies(node, varying)
            continue
        if node.target not in starting and not any(n in varying for n in node.all_input_nodes):
            continue
        varying.add(node)
        node.meta[VARYING] = index, size
        if node.target in starting:
            continue
        for source in node.all_input_nodes:
            if source not in varying and _requires_grad(source):
                if source not in crossings:
                    crossings[source] = _vary(step.graph, source, node)
                node.replace_input_with(source, crossings[source])
    _check_outputs(step, varying)
    step.graph.lint()
    return step


def split_parameters(step: StepGraph) -> frozenset[str]:
    """Names of the parameters of which a rank has a part, in a step that is marked."""
    return frozenset(
        role.name
        for node, role in step.roles.items()
        if role.kind is InputKind.PARAMETER and VARYING in node.meta
    )


def gathered_parameters(step: StepGraph) -> list[str]:
    """Names of those that are put together, for code outside of their layers."""
    return sorted(
        role.name
        for node, role in step.roles.items()
        if role.kind is InputKind.PARAMETER and any(user.target is GATHER for user in node.users)
    )


def _requires_grad(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _vary(graph: fx.Graph, source: fx.Node, user: fx.Node) -> fx.Node:
    """A crossing right before its first user, so that no cut comes between and sends it as well."""
    with graph.inserting_before(user):
        node = graph.call_function(VARY, (source, TENSOR_GROUP))
    node.meta = dict(user.meta)
    node.meta["val"] = source.meta["val"]
    return node


def _check_varies(node: fx.Node, varying: Collection[fx.Node]) -> None:
    """A sum of what is equal already would be a multiple of it."""
    if node.args[0] not in varying:
        raise CaptureError(
            f"{describe(node)} brings together parts that the ranks of a tensor-parallel group do "
            f"not have: its operand is equal on all of them. Split the weights of the module "
            f"before it, or leave this one whole (smp.set_tensor_parallelism(module, False))."
        )


def _check_outputs(step: StepGraph, varying: Collection[fx.Node]) -> None:
    for node, role in step.ends:
        if node in varying:
            what = {
                OutputKind.BUFFER: f"The new value of {role.name}, which the step changes,",
                OutputKind.OBJECTIVE: "A value that model.backward is called with",
                OutputKind.RESULT: "A value that the step function returns",
            }[role.kind]
            raise CaptureError(
                f"{what} ({describe(node)}) differs between the ranks of a tensor-parallel group: "
                f"it is computed from split weights, and nothing brings the parts together. Leave "
                f"the module whole (smp.set_tensor_parallelism(module, False)), or do not return "
                f"what lies inside of it."
            )


def draws_for_part(node: fx.Node) -> bool:
    """Whether a node of a step draws random numbers for a value that varies."""
    is_idle = node.target is torch.ops.aten.dropout.default and not node.args[1]
    return VARYING in node.meta and is_random(node) and not is_idle
