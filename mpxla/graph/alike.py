"""Whether ranks that share the tensors of a model have captured the same step.

Each of them captures by itself, with its own Python. Where that reads something that differs (a
seed, the rank), what is to be equal on all of them would drift apart without an error; so they
compare lines. What says which part a rank has may differ.

This module must not know how ranks communicate.
"""

import hashlib
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from mpxla.graph.collectives import is_of_group
from mpxla.graph.fingerprint import bytes_of
from mpxla.graph.stepgraph import InputKind, StepGraph, describe

__all__ = ["is_same_step", "lines_of", "outputs_of"]

_aten = torch.ops.aten
_OF_PLACES = (
    *(_aten.narrow.default, _aten.slice.Tensor, _aten.select.int),
    *(_aten.arange.default, _aten.arange.start, _aten.arange.start_step),
)
"""Operators that take whole numbers by which ranks find their parts."""


def lines_of(step: StepGraph) -> list[str]:
    """Lines that are equal on two ranks of a tensor-parallel group if their steps are."""
    constants = [_constant(name, value) for name, value in step.constants.items()]
    numbers: dict[fx.Node, int] = {}
    nodes: list[str] = []
    for node in step.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "call_function":
            nodes.append(f"{describe(node)} of {_arguments(node, numbers)}")
    return [*nodes, *constants, *step.lines_of_flags]


def _arguments(node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    has_places = node.target in _OF_PLACES or is_of_group(node)
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    left = (leaf for leaf in leaves if not (has_places and type(leaf) is int))
    return ", ".join(_text(leaf, numbers) for leaf in left)


def _text(value: Any, numbers: dict[fx.Node, int]) -> str:
    if not isinstance(value, fx.Node):
        return repr(value) if isinstance(value, (bool, int, float, str)) else str(value)
    known = value.meta.get("val")
    shape = list(known.shape) if isinstance(known, torch.Tensor) else ""
    return f"value {numbers[value]}{shape}"


def _constant(name: str, value: torch.Tensor) -> str:
    digest = hashlib.blake2b(bytes_of(value.cpu()), digest_size=8)
    what = f"the tensor {name} of shape {list(value.shape)}, which the step function found outside"
    return f"{what}, with values {digest.hexdigest()}"


def is_same_step(one: StepGraph, other: StepGraph) -> bool:
    """Whether two captures have the same graph."""
    return lines_of(one) == lines_of(other) and outputs_of(one) == outputs_of(other)


def outputs_of(step: StepGraph, with_buffers: bool = True) -> list[Any]:
    """What outputs are computed of, and by what; constants of one shape count as the same.

    And the flags of parameters that it leaves. Without buffers, those that it only reads count as
    constants: tables are often made of them.
    """
    digests: dict[fx.Node, tuple[bool, str]] = {}
    roles, changed = step.roles, step.changed

    def digest(node: fx.Node) -> tuple[bool, str]:
        value = node.meta.get("val")
        form = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else ""
        role = roles.get(node)
        if role is not None:
            is_read = role.kind is InputKind.BUFFER and role.name not in changed
            is_constant = role.kind is InputKind.CONSTANT or (is_read and not with_buffers)
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
    return [*((role, digests[node]) for node, role in step.ends), step.flags]
