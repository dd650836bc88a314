"""Operators that would mix parts of which every rank has one.

A layer that is split by columns gives each rank a part of the columns, or of the heads. What
computes column by column, or head by head, is right on parts. A softmax or a norm over all columns,
or the first half of them, is not: it would see one rank's part without an error.

    columns [N, S, W / 2] -> heads [N, S, h / 2, d] -> [N, h / 2, S, d]     the dim that is split
                     ^                     ^                ^               is followed
    softmax over the last dim:  refused                right

Operands that meet along the dim have to be split there too, or to be the same at all positions:
slopes of heads that are made by `arange` would be those of the first heads on every rank. A product
that sums over the dim gives a part of a sum, see `partial_sums.py`.

Where an operator is not known here, the dim is not followed any more, and nothing is refused.

This module must not know modules or ranks of the job.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from mpxla.errors import CaptureError
from mpxla.graph.collectives import CROSS_ENTROPY, GATHER, OWN_PART, SUM, VARY
from mpxla.graph.operand_dims import (
    MOVING,
    PIECES,
    Combined,
    combined,
    dims_along,
    moved_dims,
    view_groups,
)
from mpxla.graph.stepgraph import VIEWS, InputKind, StepGraph, describe
from mpxla.graph.tensor.partial_sums import CURVED_ALONG_DIMS, PartialSums
from mpxla.graph.tensor.positions import dims_with_positions, is_uniform
from mpxla.graph.typed import arguments_of, input_of, named_arguments, target_of

__all__ = ["check_split_dims"]

_aten = torch.ops.aten


class _Along(NamedTuple):
    """Where a value is split: the dim, counted from the last (-1), and its equal blocks."""

    dim: int
    blocks: int


_ALONG_DIMS = (
    *CURVED_ALONG_DIMS,
    *(_aten.cumsum.default, _aten.cumprod.default, _aten.flip.default, _aten.roll.default),
)
"""Operators along dims, which keep the shape or that of the other dims."""
_REDUCTIONS = frozenset(
    f"aten::{name}"
    for name in (
        *("mean", "sum", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "norm"),
        *("linalg_vector_norm", "logsumexp", "std", "var", "any", "all", "median", "var_mean"),
    )
)


def check_split_dims(step: StepGraph, split: Mapping[str, tuple[int, int]]) -> None:
    """Checks that nothing in a step works along a dim of which a rank has a part.

    Args:
        step: as captured with the shards of one rank.
        split: parameter -> (dim that is split, equal blocks along it).

    Raises:
        CaptureError: something does.
    """
    walk = _Walk()
    for node, role in step.roles.items():
        if role.kind is InputKind.PARAMETER and role.name in split:
            dim, blocks = split[role.name]
            walk.known[node] = _Along(dim - node.meta["val"].dim(), blocks)
            walk.varying.add(node)
    for node in step.graph.nodes:
        if node.op == "call_function":
            walk.visit(node)


class _Walk:
    """Goes over the nodes of a step in their order.

    Attributes:
        known: values that are split along a dim that is known.
        varying: all values that differ between the ranks.
    """

    def __init__(self) -> None:
        self.known: dict[fx.Node, _Along] = {}
        self.varying: set[fx.Node] = set()
        self._positions: dict[fx.Node, frozenset[int]] = {}
        self._sums = PartialSums(self.varying, self.known.keys())

    def visit(self, node: fx.Node) -> None:
        """Finds out where the result of an operator is split.

        Raises:
            CaptureError: the operator works along the dim.
        """
        target = target_of(node)
        if target in (CROSS_ENTROPY, GATHER, SUM):
            return
        if target is OWN_PART:
            value, dim, *_, blocks, _ = arguments_of(node)
            self.known[node] = _Along(dim - value.meta["val"].dim(), blocks)
            self.varying.add(node)
            return
        is_equal = is_uniform(node) or not any(n in self.varying for n in node.all_input_nodes)
        if is_equal and target is not VARY:
            dims_with_positions(node, self._positions)  # in their order, so that none is deep
            return
        self.varying.add(node)
        if any(n in self.known for n in node.all_input_nodes):
            dims = combined(node)
            along = self._after(node) if dims is None else self._of_operands(node, dims)
            if along is not None:
                self.known[node] = along
        self._sums.visit(node)

    def _after(self, node: fx.Node) -> _Along | None:
        """Of the result of an operator on one value; None where that is unknown."""
        source, target = node.all_input_nodes[0], target_of(node)
        if source not in self.known:
            return None
        find: Callable[[fx.Node, fx.Node, _Along], _Along | None] | None = _RULES.get(target)
        if find is None and getattr(target, "_schema", None) is not None:
            find = _reduced if target._schema.name in _REDUCTIONS else None
        return None if find is None else find(node, source, self.known[source])

    def _of_operands(self, node: fx.Node, dims: Combined) -> _Along | None:
        """Of the result of an operator that combines values."""
        split = [(n, letters) for n, letters in dims.operands if n in self.known]
        source, _ = split[0]
        places = {(letters[self.known[n].dim], self.known[n].blocks) for n, letters in split}
        if len(places) > 1:  # parts of each meet other parts than those of this rank
            _refuse(node, source, self.known[source])
        ((letter, blocks),) = places
        for other, letters in dims.operands:
            if other not in self.varying and letter in letters:
                self._check_equal(node, source, other, letters.index(letter) - len(letters))
        if letter not in dims.result:
            self._sums.add(node)
            return None
        along = _Along(dims.result.index(letter) - len(dims.result), blocks)
        value = node.meta["val"]
        if target_of(node) is _aten.cat.default:
            if named_arguments(node)["dim"] % value.dim() == value.dim() + along.dim:
                return None
        for one, letters in split:
            if one.meta["val"].shape[letters.index(letter)] != value.shape[along.dim]:
                _refuse(node, one, self.known[one])  # it is repeated, to meet all parts of another
        return along

    def _check_equal(self, node: fx.Node, source: fx.Node, other: fx.Node, dim: int) -> None:
        """Checks that a value that is equal on all ranks is the same at all positions of a dim."""
        if dim in dims_with_positions(other, self._positions):
            raise CaptureError(
                f"{describe(node)} takes positions of a value {list(source.meta['val'].shape)} of "
                f"which every rank of a tensor-parallel group has a part together with those of a "
                f"value {list(other.meta['val'].shape)} that is equal on all ranks "
                f"({describe(other)}), where each rank would need those of its own part. Leave "
                f"the module whole (smp.set_tensor_parallelism(module, False))."
            )


def _refuse(node: fx.Node, source: fx.Node, along: _Along) -> None:
    shape = list(source.meta["val"].shape)
    raise CaptureError(
        f"{describe(node)} works along dim {len(shape) + along.dim} of a value {shape} of which "
        f"every rank of a tensor-parallel group has a part, so that it would not see the others'. "
        f"Leave the module before it whole (smp.set_tensor_parallelism(module, False))."
    )


def _repeated(node: fx.Node, source: fx.Node, along: _Along) -> _Along | None:
    """With more elements along another dim, or each of them some times."""
    before, after = source.meta["val"].shape, node.meta["val"].shape
    is_each = node.target is _aten.repeat_interleave.self_int and len(before) == len(after)
    return along if is_each or before[along.dim] == after[along.dim] else None


def _viewed(node: fx.Node, source: fx.Node, along: _Along) -> _Along | None:
    """In another shape: the split dim has to be the outermost of those that become others."""
    before, after = source.meta["val"].shape, node.meta["val"].shape
    place = len(before) + along.dim
    if before[place] == 1 or along.blocks > 1:
        return along if before[along.dim :] == after[along.dim :] else None
    olds, news = next(group for group in view_groups(before, after) if place in group[0])
    is_first = all(before[i] == 1 for i in olds if i < place)
    has_ones = len(news) > 1 and any(after[i] == 1 for i in news)
    return _Along(news[0] - len(after), 1) if news and is_first and not has_ones else None


def _moved(node: fx.Node, source: fx.Node, along: _Along) -> _Along | None:
    order = moved_dims(node)
    return _Along(order.index(source.meta["val"].dim() + along.dim) - len(order), along.blocks)


def _along_dims(node: fx.Node, source: fx.Node, along: _Along) -> _Along | None:
    if along.dim in _dims_of(node, source):
        if along.blocks == 1:
            _refuse(node, source, along)
        return None
    return along


def _reduced(node: fx.Node, source: fx.Node, along: _Along) -> _Along | None:
    arguments = named_arguments(node)
    if "other" in arguments:  # of two values, element by element
        return None
    dims = _dims_of(node, source)
    if along.dim in dims:
        _refuse(node, source, along)
    removed = 0 if arguments.get("keepdim") else sum(d > along.dim for d in dims)
    return _Along(along.dim + removed, along.blocks)


def _dims_of(node: fx.Node, source: fx.Node) -> set[int]:
    """Dims that an operator works along, counted from the last."""
    count = source.meta["val"].dim()
    return {dim - count for dim in dims_along(node, count)}


def _piece(node: fx.Node, source: fx.Node, along: _Along) -> _Along | None:
    """Of pieces along a dim: whole blocks, if it is the one that is split."""
    value = source.meta["val"]
    count, arguments = value.dim(), named_arguments(node)
    dim = arguments.get("dim", 0) % count - count
    is_removed = node.target in (_aten.select.int, _aten.unbind.int)
    if dim != along.dim:
        return _Along(along.dim + (is_removed and dim > along.dim), along.blocks)
    result: Any = node.meta["val"]
    pieces: list[Any] = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(pieces) == 1 and not is_removed and pieces[0].shape == value.shape:
        return along
    if along.blocks == 1:
        _refuse(node, source, along)
    is_equal = len(pieces) == along.blocks and not is_removed
    return _Along(along.dim, 1) if is_equal else None


def _item(node: fx.Node, source: fx.Node, along: _Along) -> _Along | None:
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return along if is_tensor and input_of(node) is source else None


_RULES: Mapping[Any, Callable[[fx.Node, fx.Node, _Along], _Along | None]] = {
    _aten.dropout.default: lambda node, source, along: along,
    **dict.fromkeys((_aten.expand.default, _aten.repeat_interleave.self_int), _repeated),
    **dict.fromkeys(VIEWS, _viewed),
    **dict.fromkeys(_ALONG_DIMS, _along_dims),
    **dict.fromkeys(PIECES, _piece),
    **dict.fromkeys(MOVING, _moved),
    operator.getitem: _item,
}
