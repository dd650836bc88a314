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
from mpxla.graph.stepgraph import StepGraph, describe

__all__ = ["lines_of"]

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
