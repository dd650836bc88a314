"""Operators that would mix parts of which every rank has one.

A layer that is split by columns gives each rank a part of the columns, or of the heads. What
computes column by column, or head by head, is right on parts. A softmax or a norm over all columns,
or the first half of them, is not: it would see one rank's part without an error.

    columns [N, S, W / 2] -> heads [N, S, h / 2, d] -> [N, h / 2, S, d]     the dim that is split
                     ^                     ^                ^               is followed
    softmax over the last dim:  refused                right

Where an operator is not known here, the dim is not followed any more, and nothing is refused.

This module must not know modules or ranks of the job.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from mpxla.errors import CaptureError
from mpxla.graph.stepgraph import CASTS, VIEWS, InputKind, StepGraph, describe
from mpxla.graph.typed import arguments_of, input_of, named_arguments

__all__ = ["check_split_dims"]

_aten = torch.ops.aten


class _Along(NamedTuple):
    """Where a value is split: the dim, counted from the last (-1), and its equal blocks."""

    dim: int
    blocks: int


_SAME = (*CASTS, _aten.detach.default, _aten.dropout.default)
_ALONG_DIMS = (
    *(_aten.softmax.int, _aten._softmax.default, _aten.log_softmax.int, _aten._log_softmax.default),
    *(_aten.layer_norm.default, _aten.rms_norm.default, _aten.glu.default, _aten.topk.default),
    *(_aten.cumsum.default, _aten.cumprod.default, _aten.flip.default, _aten.roll.default),
    *(_aten.sort.default, _aten.sort.stable, _aten.argsort.default, _aten.logcumsumexp.default),
)
"""Operators along dims, which keep the shape or that of the other dims."""
_REDUCTIONS = frozenset(
    f"aten::{name}"
    for name in (
        *("mean", "sum", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "norm"),
        *("linalg_vector_norm", "logsumexp", "std", "var", "any", "all", "median", "var_mean"),
    )
)
_PIECES = (
    *(_aten.slice.Tensor, _aten.narrow.default, _aten.select.int, _aten.unbind.int),
    *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default, _aten.split.sizes),
)


def check_split_dims(step: StepGraph, split: Mapping[str, tuple[int, int]]) -> None:
    """Checks that nothing in a step works along a dim of which a rank has a part.

    Args:
        step: as captured with the shards of one rank.
        split: parameter -> (dim that is split, equal blocks along it).

    Raises:
        CaptureError: something does.
    """
    known: dict[fx.Node, _Along] = {}
    for node, role in zip(step.placeholders, step.inputs, strict=True):
        if role.kind is InputKind.PARAMETER and role.name in split:
            dim, blocks = split[role.name]
            known[node] = _Along(dim - node.meta["val"].dim(), blocks)
    for node in step.graph.nodes:
        if node.op == "call_function" and any(n in known for n in node.all_input_nodes):
            along = _after(node, known)
            if along is not None:
                known[node] = along


def _after(node: fx.Node, known: Mapping[fx.Node, _Along]) -> _Along | None:
    """Where the result of an operator is split; None where that is unknown."""
    target: Any = node.target
    if torch.Tag.pointwise in getattr(target, "tags", ()) or target is _aten.cat.default:
        return _of_operands(node, known)
    if target in (_aten.linear.default, _aten.addmm.default, _aten.mm.default):
        return _of_layer(node, known)
    if target in (_aten.matmul.default, _aten.bmm.default):
        return _of_product(node, known)
    source = node.all_input_nodes[0]
    if source not in known:
        return None
    along = known[source]
    if target is _aten.scaled_dot_product_attention.default:
        return along if along.dim <= -3 else None
    find: Callable[[fx.Node, fx.Node, _Along], _Along | None] | None = _RULES.get(target)
    if find is None and getattr(target, "_schema", None) is not None:
        find = _reduced if target._schema.name in _REDUCTIONS else None
    return None if find is None else find(node, source, along)


def _refuse(node: fx.Node, source: fx.Node, along: _Along) -> None:
    shape = list(source.meta["val"].shape)
    raise CaptureError(
        f"{describe(node)} works along dim {len(shape) + along.dim} of a value {shape} of which "
        f"every rank of a tensor-parallel group has a part, so that it would not see the others'. "
        f"Leave the module before it whole (smp.set_tensor_parallelism(module, False))."
    )


def _of_operands(node: fx.Node, known: Mapping[fx.Node, _Along]) -> _Along | None:
    """Of values that are taken element by element, or put one after the other."""
    found = {known[n] for n in node.all_input_nodes if n in known}
    result = node.meta.get("val")
    if len(found) != 1 or not isinstance(result, torch.Tensor):
        return None
    (along,) = found
    if node.target is _aten.cat.default:
        if named_arguments(node)["dim"] % result.dim() == result.dim() + along.dim:
            return None
    for source in (n for n in node.all_input_nodes if n in known):
        if source.meta["val"].shape[along.dim] != result.shape[along.dim]:
            _refuse(node, source, along)  # it meets all parts of something, and is repeated
    return along


def _of_layer(node: fx.Node, known: Mapping[fx.Node, _Along]) -> _Along | None:
    """Of a product with a weight: by outputs, or of a sum that is not complete."""
    is_linear = node.target is _aten.linear.default
    arguments = arguments_of(node)
    value, weight = arguments[1:3] if node.target is _aten.addmm.default else arguments[:2]
    of_weight = known.get(weight)
    if of_weight is not None:
        outputs = -2 if is_linear else -1
        return _Along(-1, of_weight.blocks) if of_weight.dim == outputs else None
    along = known.get(value)
    return along if along is not None and along.dim != -1 else None


def _of_product(node: fx.Node, known: Mapping[fx.Node, _Along]) -> _Along | None:
    """Of matrices: of each of many, or of the rows or columns of the result."""
    operands = arguments_of(node)[:2]
    if any(operand.meta["val"].dim() < 2 for operand in operands):
        return None
    one, other = (known.get(operand) for operand in operands)
    found = {a for a in (one, other) if a is not None and a.dim <= -3}
    if one is not None and one.dim == -2:
        found.add(one)
    if other is not None and other.dim == -1:
        found.add(other)
    is_sum = one is not None and one.dim == -1
    is_sum = is_sum or (other is not None and other.dim == -2)
    return found.pop() if len(found) == 1 and not is_sum else None


def _kept(node: fx.Node, source: fx.Node, along: _Along) -> _Along | None:
    return along


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
    start, end = 0, 0
    while start < len(before):
        olds, news = [start], [end]
        while _size(before, olds) != _size(after, news) and max(olds[-1], news[-1]) < 64:
            grown = olds if _size(before, olds) < _size(after, news) else news
            grown.append(grown[-1] + 1)
        if place in olds:
            is_first = all(before[i] == 1 for i in olds if i < place)
            has_ones = len(news) > 1 and any(after[i] == 1 for i in news if i < len(after))
            is_known = is_first and not has_ones and news[0] < len(after)
            return _Along(news[0] - len(after), 1) if is_known else None
        start, end = olds[-1] + 1, news[-1] + 1
    return None


def _size(shape: Sequence[int], dims: Sequence[int]) -> int:
    size = 1
    for dim in dims:
        size *= shape[dim] if dim < len(shape) else 1
    return size


def _transposed(node: fx.Node, source: fx.Node, along: _Along) -> _Along | None:
    count = source.meta["val"].dim()
    arguments = named_arguments(node)
    order = list(range(count))
    if count < 2:
        return along
    if "dims" in arguments:
        order = [d % count for d in arguments["dims"]]
    else:
        one, other = (arguments.get(n, default) for n, default in (("dim0", -1), ("dim1", -2)))
        order[one], order[other] = order[other], order[one]
    return _Along(order.index(count + along.dim) - count, along.blocks)


def _unsqueezed(node: fx.Node, source: fx.Node, along: _Along) -> _Along | None:
    count = source.meta["val"].dim()
    is_right = named_arguments(node)["dim"] % (count + 1) > count + along.dim
    return _Along(along.dim - is_right, along.blocks)


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
    arguments = named_arguments(node)
    if "normalized_shape" in arguments:
        return set(range(-len(arguments["normalized_shape"]), 0))
    given = next((arguments[name] for name in ("dim", "dims") if name in arguments), None)
    if given is None or given == []:
        return set(range(-count, 0))
    return {d % count - count for d in ([given] if isinstance(given, int) else given)}


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
    **dict.fromkeys(_SAME, _kept),
    **dict.fromkeys((_aten.expand.default, _aten.repeat_interleave.self_int), _repeated),
    **dict.fromkeys(VIEWS, _viewed),
    **dict.fromkeys(_ALONG_DIMS, _along_dims),
    **dict.fromkeys(_PIECES, _piece),
    **dict.fromkeys(
        (_aten.transpose.int, _aten.permute.default, _aten.t.default),
        _transposed,
    ),
    _aten.unsqueeze.default: _unsqueezed,
    operator.getitem: _item,
}
