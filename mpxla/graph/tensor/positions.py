"""Along which dims the elements of a value are others at each position.

    mask [N, 1, S, S]      all that are longer than 1, as far as anybody knows
    ones(h, 1)             none
    arange(h)[:, None]     the first

A value that is equal on all ranks may meet another of which each has a part, if it is the same at
all positions of the dim that is split: that of the first rank would be taken for those of all.

This module must not know which values are split.
"""

import torch
from torch import fx

from mpxla.graph.operand_dims import MOVING, is_elementwise, moved_dims
from mpxla.graph.typed import input_of, target_of

__all__ = ["dims_with_positions", "is_uniform"]

_aten = torch.ops.aten
_UNIFORM = frozenset(
    f"aten::{name}{suffix}"
    for name in ("zeros", "ones", "full", "scalar_tensor")
    for suffix in ("", "_like")
) | {f"aten::new_{name}" for name in ("zeros", "ones", "full")}


def dims_with_positions(node: fx.Node, known: dict[fx.Node, frozenset[int]]) -> frozenset[int]:
    """Dims of a value along which positions differ, counted from the last (-1).

    Args:
        node: a tensor.
        known: results so far, to which this one is added.
    """
    if node not in known:
        known[node] = _found(node, known)
    return known[node]


def _found(node: fx.Node, known: dict[fx.Node, frozenset[int]]) -> frozenset[int]:
    value, target = node.meta.get("val"), target_of(node)
    if not isinstance(value, torch.Tensor):
        return frozenset()
    every = frozenset(d - value.dim() for d, length in enumerate(value.shape) if length > 1)
    if is_uniform(node):
        return frozenset()
    if is_elementwise(node):
        return frozenset().union(*(dims_with_positions(n, known) for n in node.all_input_nodes))
    if target is _aten.expand.default:
        return dims_with_positions(input_of(node), known)
    if target in MOVING:
        before, order = dims_with_positions(input_of(node), known), moved_dims(node)
        count = input_of(node).meta["val"].dim()
        places = enumerate(order, -value.dim())
        return frozenset(i for i, d in places if d is not None and d - count in before)
    return every


def is_uniform(node: fx.Node) -> bool:
    """Whether a node makes a value whose elements are all equal, whatever its operands are."""
    return getattr(getattr(node.target, "_schema", None), "name", "") in _UNIFORM
