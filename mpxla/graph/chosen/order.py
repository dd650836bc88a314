"""How operators that put chosen rows in order treat them, and numbers of chosen rows: see
`values.py`.

    rows           a  .  b  c  .        those that a mask chooses, in their places
    sorted         b  .  c  a  .        in order, in the same places
    its indices    1  .  2  0  .        numbers, counted among those that are chosen

A number of a row becomes its place where rows are read or written by it.
"""

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mpxla.graph.chosen.values import Dims, Rows, Rule, Walk, limit_of, mark_of, of_each, refused
from mpxla.graph.operand_dims import dims_along
from mpxla.graph.typed import input_of, named_arguments, target_of

__all__ = ["RULES_OF_ORDER", "extreme_or", "place_of"]

_aten = torch.ops.aten


def place_of(walk: Walk, rows: Rows, numbers: fx.Node) -> fx.Node:
    """The places of chosen rows that have some numbers, counted from zero or back from the end."""
    count = walk.count(rows)
    if any(walk.dims_of(numbers)):  # there are none of these either where no row is chosen
        count = walk.call(_aten.clamp_min.default, count, 1)
    from_end = walk.call(_aten.add.Tensor, numbers, count)
    is_negative = walk.call(_aten.lt.Scalar, numbers, 0)
    number = walk.call(_aten.where.self, is_negative, from_end, numbers)
    is_beyond = walk.call(_aten.ge.Tensor, number, count)
    is_before = walk.call(_aten.lt.Scalar, number, 0)
    is_beyond = walk.call(_aten.logical_or.default, is_beyond, is_before)
    number = walk.call(_aten.clamp.default, number, 0, rows.size - 1)
    places = walk.call(_aten.index.Tensor, walk.in_order(rows), [number])
    return walk.call(_aten.masked_fill.Scalar, places, is_beyond, mark_of(torch.int64))


def _ones_and_zeros(walk: Walk, mask: fx.Node) -> fx.Node:
    return walk.call(_aten.to.dtype, mask, torch.int32)


def _argsort(walk: Walk, value: fx.Node, dim: int, descending: bool = False) -> fx.Node:
    keys = {"stable": True, "dim": dim, "descending": descending}
    return walk.call(operator.getitem, walk.call(_aten.sort.stable, value, **keys), 1)


def _order(walk: Walk, source: fx.Node, dim: int, descending: bool) -> fx.Node:
    """The places of a value's rows along a dim in the order of its numbers; those that do not count
    come last, whatever the others hold.
    """
    dims = walk.dims_of(source)
    rows = dims[dim]
    order = _argsort(walk, walk.call(_aten.detach.default, source), dim, descending)
    if rows is None:
        return order
    absent = walk.along(_ones_and_zeros(walk, walk.absent(rows)), dim, len(dims))
    absent = walk.call(_aten.expand.default, absent, walk.sizes(source))
    absent = walk.call(_aten.gather.default, absent, dim, order)
    return walk.call(_aten.gather.default, order, dim, _argsort(walk, absent, dim))


def _numbers(walk: Walk, rows: Rows, places: fx.Node) -> fx.Node:
    return walk.call(_aten.index.Tensor, walk.number_rows(rows), [places])


def _along(node: fx.Node, dims: Dims) -> tuple[int, Rows] | None:
    """The dim along which a node puts rows in order, and these; None where all rows count there."""
    along = [(d, rows) for d in dims_along(node, len(dims)) if (rows := dims[d]) is not None]
    if along and len(dims_along(node, len(dims))) > 1:
        raise refused(node, "is put in order together with others")
    return along[0] if along else None


def _sorted(walk: Walk, node: fx.Node) -> tuple[fx.Node, Any]:
    """`sort` and `argsort`."""
    source = input_of(node)
    dims = walk.dims_of(source)
    along = _along(node, dims)
    if along is None:
        return of_each(node, dims)
    dim, rows = along
    order = _order(walk, source, dim, bool(named_arguments(node)["descending"]))
    order = walk.call(_aten.index_select.default, order, dim, walk.number_rows(rows))
    numbers = _numbers(walk, rows, order)
    if target_of(node)._schema.name == "aten::argsort":
        return numbers, dims
    return _parts(walk, node, [walk.call(_aten.gather.default, source, dim, order), numbers], dims)


def _parts(walk: Walk, node: fx.Node, parts: list[fx.Node], dims: Dims) -> tuple[fx.Node, Any]:
    walk.parts[node] = parts
    return node, [dims] * len(parts)


def _greatest(walk: Walk, node: fx.Node) -> tuple[fx.Node, Any]:
    """`topk`. Where fewer rows are chosen, the rest is NaN: PyTorch raises."""
    source, arguments = input_of(node), named_arguments(node)
    dims = walk.dims_of(source)
    number, (dim,) = arguments["k"], dims_along(node, len(dims))
    rows, whole = dims[dim], walk.sizes(source)[dim]
    if rows is None and not isinstance(number, fx.Node):
        return of_each(node, dims)
    found: Rows | None = None
    order = _order(walk, source, dim, bool(arguments["largest"]))
    size = whole if isinstance(number, fx.Node) else number
    if size > whole:
        raise refused(node, "has fewer rows than that")
    rank = walk.call(_aten.arange.default, size, device=torch.device("cpu"))
    there = whole if rows is None else walk.count(rows)
    compare = _aten.ge.Scalar if rows is None else _aten.ge.Tensor
    missing = walk.call(compare, rank, there)
    if isinstance(number, fx.Node):
        counts = walk.call(_aten.lt.Tensor, rank, walk.as_number(number, node))
        found = Rows(counts, size)
        walk.note(node.meta["val"][0].shape[dim], found, is_counted=True)
        missing = walk.call(_aten.logical_and.default, missing, counts)
        is_beyond = walk.call(_aten.gt.Scalar, walk.as_number(number, node), whole)
        missing = walk.call(_aten.logical_or.default, missing, is_beyond)
    order = walk.call(_aten.slice.Tensor, order, dim, 0, size)
    missing = walk.along(missing, dim, len(dims))
    values = walk.call(_aten.gather.default, source, dim, order)
    values = walk.call(_aten.masked_fill.Scalar, values, missing, mark_of(source.meta["val"].dtype))
    numbers = order if rows is None else _numbers(walk, rows, order)
    numbers = walk.call(_aten.masked_fill.Scalar, numbers, missing, mark_of(torch.int64))
    return _parts(walk, node, [values, numbers], (*dims[:dim], found, *dims[dim + 1 :]))


def _flipped(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    source = input_of(node)
    dims = walk.dims_of(source)
    for dim in sorted(d % len(dims) for d in named_arguments(node)["dims"]):
        rows = dims[dim]
        if rows is None:
            source = walk.call(_aten.flip.default, source, [dim])
            continue
        last = walk.call(_aten.sub.Tensor, walk.count(rows), 1)
        number = walk.call(_aten.sub.Tensor, last, walk.number_rows(rows))
        number = walk.call(_aten.clamp.default, number, 0, rows.size - 1)
        places = walk.call(_aten.index.Tensor, walk.in_order(rows), [number])
        source = walk.call(_aten.index_select.default, source, dim, places)
    return source, dims


def _place_of_extreme(walk: Walk, source: fx.Node, dim: int, is_max: bool) -> fx.Node:
    """The place of the first row that has it; one that does not count may hold the same."""
    dims, dtype = walk.dims_of(source), source.meta["val"].dtype
    rows = dims[dim]
    assert rows is not None
    value = walk.call(_aten.detach.default, source)
    walk.set_dims(value, dims)
    filled = walk.filled(value, dims, limit_of(dtype, -1 if is_max else 1), (dim,))
    best = walk.call((_aten.amax if is_max else _aten.amin).default, filled, [dim], True)
    found = walk.call(_aten.eq.Tensor, value, best)
    if dtype.is_floating_point:
        nans = (walk.call(_aten.isnan.default, v) for v in (value, best))
        both = walk.call(_aten.logical_and.default, *nans)
        found = walk.call(_aten.logical_or.default, found, both)
    present = walk.along(rows.mask, dim, len(dims))
    found = walk.call(_aten.logical_and.default, found, present)
    return walk.call(_aten.argmax.default, _ones_and_zeros(walk, found), dim, True)


def _extreme(walk: Walk, node: fx.Node) -> tuple[fx.Node, Any] | None:
    """`max` and `min` along a dim, `argmax` and `argmin`; None where all rows count there."""
    source, arguments = input_of(node), named_arguments(node)
    dims = walk.dims_of(source)
    if "dim" not in arguments:  # there are no numbers
        return None
    along = _along(node, dims)
    if along is None:
        return None
    dim, rows = along
    name = target_of(node)._schema.name
    order = _place_of_extreme(walk, source, dim, name in ("aten::max", "aten::argmax"))
    keeps = bool(arguments.get("keepdim"))

    def result(value: fx.Node, dtype: torch.dtype) -> fx.Node:
        value = value if keeps else walk.call(_aten.squeeze.dim, value, dim)
        return walk.marked(value, rows, dtype)

    numbers = result(_numbers(walk, rows, order), torch.int64)
    rest = (*dims[:dim], *([None] if keeps else []), *dims[dim + 1 :])
    if name in ("aten::argmax", "aten::argmin"):
        return numbers, rest
    values = walk.call(_aten.gather.default, source, dim, order)
    return _parts(walk, node, [result(values, source.meta["val"].dtype), numbers], rest)


def extreme_or(rule: Rule) -> Rule:
    """Extremes with their numbers along rows that are chosen; all else by another rule."""
    return lambda walk, node: _extreme(walk, node) or rule(walk, node)


def _median(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """The lower of the middle ones of all elements."""
    source = input_of(node)
    dims = walk.dims_of(source)
    if len(dims) != 1 or dims[0] is None:
        raise refused(node, "is put in order together with others")
    middle = walk.call(_aten.sub.Tensor, walk.count(dims[0]), 1)
    middle = walk.call(_aten.clamp_min.default, middle, 0)
    middle = walk.call(_aten.div.Tensor_mode, middle, 2, rounding_mode="floor")
    place = walk.call(_aten.index.Tensor, _order(walk, source, 0, False), [middle])
    value = walk.call(_aten.index.Tensor, source, [place])
    if not source.meta["val"].is_floating_point():
        return value, ()
    is_nan = walk.filled(walk.call(_aten.isnan.default, source), dims, False)
    is_nan = walk.call(_aten.any.default, is_nan)
    none = walk.call(_aten.logical_not.default, walk.some(dims[0]))
    is_nan = walk.call(_aten.logical_or.default, is_nan, none)
    return walk.call(_aten.masked_fill.Scalar, value, is_nan, math.nan), ()


def _permuted(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`randperm(count)`: the numbers of the rows in the order of a permutation of all places."""
    rows = walk.rows_of_size(node, node.meta["val"].shape[0])
    assert rows is not None, "the number of rows is a symbol"
    keys = {"dtype": torch.int64, "device": torch.device("cpu")}
    drawn = walk.call(_aten.randperm.default, rows.size, **keys)
    drawn.meta["val"] = node.meta["val"]
    walk.set_dims(drawn, (rows,))
    order = _order(walk, drawn, 0, descending=False)
    order = walk.call(_aten.index.Tensor, order, [walk.number_rows(rows)])
    made = walk.call(_aten.to.dtype, _numbers(walk, rows, order), node.meta["val"].dtype)
    return made, (rows,)


RULES_OF_ORDER: Mapping[Any, Rule] = {
    **dict.fromkeys(("aten::sort", "aten::argsort"), _sorted),
    _aten.topk.default: _greatest,
    _aten.randperm.default: _permuted,
    _aten.flip.default: _flipped,
    _aten.median.default: _median,
}
"""By operator, or by the name of all its overloads."""
