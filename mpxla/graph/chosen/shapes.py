"""How operators that change shapes treat values in which only some rows count: see `values.py`.

A rule gives the node to stand for one of the graph, and what is known of the dims of its result.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mpxla.graph.chosen.order import place_of
from mpxla.graph.chosen.values import (
    Dims,
    Rows,
    Rule,
    Walk,
    aligned,
    fixed_sizes,
    met,
    of_each,
    refused,
)
from mpxla.graph.operand_dims import MOVING, PIECES, moved_dims, view_groups
from mpxla.graph.stepgraph import VIEWS
from mpxla.graph.typed import arguments_of, input_of, named_arguments, target_of

__all__ = ["RULES_OF_SHAPES"]

_aten = torch.ops.aten


def _broadcast(walk: Walk, node: fx.Node) -> tuple[fx.Node, list[Dims]]:
    dims = aligned(walk, node, node.all_input_nodes, node.meta["val"][0].dim())
    return node, [dims] * len(node.meta["val"])


def _item(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    source, item = arguments_of(node)
    if source in walk.parts:
        made = walk.copied(walk.parts[source][item], node.meta["val"])
        return made, walk.item_of(source, item)
    if source not in walk.places:
        return node, walk.item_of(source, item)
    rows, shape, _ = walk.places[source]
    made = walk.copied(walk.columns(rows, shape)[item], node.meta["val"])
    walk.places[made] = rows, shape, item
    return made, (rows,)


def _viewed(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """In another shape: dims become one with the rows of all, and are taken apart again."""
    source, after = input_of(node), node.meta["val"].shape
    before, dims = source.meta["val"].shape, walk.dims_of(source)
    found: list[Rows | None] = [None] * len(after)
    for olds, news in view_groups([*map(_hint, before)], [*map(_hint, after)]):
        _regroup(walk, node, (before, dims, olds), (after, found, news))
    sizes = fixed_sizes(after, found)
    if any(isinstance(size, torch.SymInt) for size in sizes):
        raise refused(node, "gets another shape")
    if source in walk.places and len(after) == 1:
        walk.places[node] = (*walk.places[source][:2], walk.places[source][2] or 0)
    return _replaced(walk, node, _aten.reshape.default, source, sizes), tuple(found)


def _replaced(walk: Walk, node: fx.Node, target: Any, *args: Any) -> fx.Node:
    made = walk.call(target, *args)
    made.meta["val"] = node.meta["val"]
    if input_of(node) in walk.numbering and node.meta["val"].dim() == 1:
        walk.numbering[made] = walk.numbering[input_of(node)]
    if node in walk.places:
        walk.places[made] = walk.places[node]
    return made


def _regroup(
    walk: Walk,
    node: fx.Node,
    before: tuple[Sequence[Any], Dims, range],
    after: tuple[Sequence[Any], list[Rows | None], range],
) -> None:
    """Finds the rows of dims that several others become."""
    sizes, dims, places = before
    parts = [dims[i] or sizes[i] for i in places if dims[i] is not None or sizes[i] != 1]
    if not any(isinstance(part, Rows) for part in parts):
        return
    new_sizes, found, new_places = after
    targets = [i for i in new_places if isinstance(new_sizes[i], torch.SymInt) or new_sizes[i] != 1]
    if len(parts) == 1 and len(targets) > 1:
        (rows,) = parts
        assert isinstance(rows, Rows), "it is the only one"
        parts = list(rows.parts)
        if len(parts) != len(targets) or any(
            isinstance(part, int) and part != new_sizes[i]
            for part, i in zip(parts, targets, strict=True)
        ):
            raise refused(node, "is taken apart into several dims")
        for part, i in zip(parts, targets, strict=True):
            found[i] = part if isinstance(part, Rows) else None
    elif len(parts) == len(targets) and all(
        _is_same(sizes[i], new_sizes[j])
        for i, j in zip([i for i in places if dims[i] or sizes[i] != 1], targets, strict=True)
    ):
        for part, i in zip(parts, targets, strict=True):
            found[i] = part if isinstance(part, Rows) else None
    elif len(targets) == 1:
        (i,) = targets
        found[i] = rows = walk.merged(parts)
        walk.note(new_sizes[i], rows)
    elif (times := _taken_along(parts, [new_sizes[i] for i in targets])) is not None:
        found[targets[0]] = rows = walk.merged([parts[0], times])
        walk.note(new_sizes[targets[0]], rows)
    else:
        raise refused(node, "gets another shape")


def _taken_along(parts: Sequence[Any], sizes: Sequence[Any]) -> int | None:
    """How many of each row become rows, where the first dim takes a part of the fixed dims after
    it: [rows, 8, 4] -> [rows * 4, 8].
    """
    first, *others = parts
    if not isinstance(first, Rows) or any(isinstance(p, Rows) for p in others):
        return None
    if not isinstance(sizes[0], torch.SymInt) or any(
        isinstance(s, torch.SymInt) for s in sizes[1:]
    ):
        return None
    times, rest = divmod(math.prod(others), math.prod(sizes[1:]))
    return None if rest else times


def _hint(size: Any) -> int:
    """A number in the place of a size that depends on values, by which sizes are told apart."""
    if not isinstance(size, torch.SymInt):
        return size
    expr = size.node.expr
    return int(expr.xreplace({symbol: _PRIME for symbol in expr.free_symbols}))


_PRIME = 1_000_003


def _is_same(one: Any, other: Any) -> bool:
    return _hint(one) == _hint(other)


def _moved(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    dims = walk.dims_of(input_of(node))
    return node, tuple(None if d is None else dims[d] for d in moved_dims(node))


def _diagonal(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    dims, arguments = walk.dims_of(input_of(node)), named_arguments(node)
    one, other = (arguments[name] % len(dims) for name in ("dim1", "dim2"))
    if dims[one] is not dims[other] or arguments["offset"]:
        raise refused(node, "is read along a diagonal")
    return node, (*(r for d, r in enumerate(dims) if d not in (one, other)), dims[one])


def _expanded(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    value = node.meta["val"]
    dims = list(aligned(walk, node, [input_of(node)], value.dim()))
    for place, size in enumerate(value.shape):
        if dims[place] is None:
            dims[place] = walk.rows_of_size(node, size)
    sizes = fixed_sizes(value.shape, dims)
    return _replaced(walk, node, _aten.expand.default, input_of(node), sizes), tuple(dims)


def _piece(walk: Walk, node: fx.Node) -> tuple[fx.Node, Any]:
    """Pieces along a dim whose rows all count; of the others, all, or the first."""
    source, arguments = input_of(node), named_arguments(node)
    dims, target = walk.dims_of(source), target_of(node)
    dim = arguments.get("dim", 0) % len(dims)
    rows, rest = dims[dim], dims[:dim] + dims[dim + 1 :]
    if target is _aten.select.int:
        if rows is not None and arguments["index"] == 0:
            first = walk.call(_aten.index_select.default, source, dim, walk.first(rows))
            first = walk.call(_aten.squeeze.dim, first, dim)
            return walk.marked(first, rows, node.meta["val"].dtype), rest
        if rows is not None and isinstance(arguments["index"], int):
            keys = {"dtype": torch.int64, "device": torch.device("cpu")}
            number = walk.call(_aten.full.default, [1], arguments["index"], **keys)
            number.meta["val"] = node.meta["val"]
            index = [*[None] * dim, place_of(walk, rows, number)]
            return walk.call(
                _aten.squeeze.dim, walk.call(_aten.index.Tensor, source, index), dim
            ), rest
        if source in walk.places and walk.places[source][2] is None:
            walk.places[node] = (*walk.places[source][:2], arguments["index"])
    if rows is not None:
        start, end = arguments.get("start"), arguments.get("end")
        is_all = target is _aten.slice.Tensor and start in (0, None) and arguments["step"] == 1
        if not is_all or not (end is None or end == walk.sizes(source)[dim] or end > 2**40):
            raise refused(node, "is divided")
        return source, dims
    if target is _aten.unbind.int and source in walk.places:
        walk.places[node] = walk.places[source]
    return of_each(node, rest if target in (_aten.unbind.int, _aten.select.int) else dims)


def _joined(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`cat` and `stack`."""
    values, arguments = arguments_of(node)[0], named_arguments(node)
    num_dims = node.meta["val"].dim()
    dim = arguments["dim"] % num_dims
    if target_of(node) is _aten.stack.default:
        dims = list(aligned(walk, node, values, num_dims - 1))
        dims.insert(dim, None)
        return node, tuple(dims)
    parts = [walk.dims_of(value) for value in values]
    others = [(*known[:dim], None, *known[dim + 1 :]) for known in parts]
    dims = list(met(node, others, num_dims))
    if any(known[dim] for known in parts):
        pieces = [
            known[dim] or value.meta["val"].shape[dim]
            for known, value in zip(parts, values, strict=True)
        ]
        dims[dim] = rows = walk.joined(pieces)
        walk.note(node.meta["val"].shape[dim], rows)
    return node, tuple(dims)


def _padded(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    dims, amounts = walk.dims_of(input_of(node)), arguments_of(node)[1]
    for place, rows in enumerate(reversed(dims)):
        if rows is not None and any(amounts[2 * place : 2 * place + 2]):
            raise refused(node, "is padded")
    return node, dims


def _made(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """A new value whose size is given."""
    dims = tuple(walk.rows_of_size(node, size) for size in node.meta["val"].shape)
    fill = named_arguments(node).get("fill_value")
    number = walk.as_number(fill, node)
    if number is not fill:
        number = walk.call(_aten.to.dtype, number, node.meta["val"].dtype)
        shape = fixed_sizes(node.meta["val"].shape, dims)
        return walk.call(_aten.expand.default, number, shape), dims
    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), walk.as_size)
    return node, dims


def _numbered(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`arange(count)`, and other numbers that are as many as the rows."""
    arguments = named_arguments(node)
    rows = walk.rows_of_size(node, node.meta["val"].shape[0])
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    if rows is None or not isinstance(step, int) or isinstance(start, float):
        raise refused(node, "is counted in a way that is not known here")
    made = walk.number_rows(rows)
    if (start, step) != (0, 1):
        made = walk.call(_aten.mul.Scalar, made, step)
        made = walk.call(_aten.add.Tensor, made, walk.as_number(start, node))
    made = walk.call(_aten.to.dtype, made, node.meta["val"].dtype)
    if (start, step) == (0, 1):
        walk.numbering[made] = rows
    return made, (rows,)


def _numbers(walk: Walk, dims: Dims, sizes: Sequence[Any]) -> list[fx.Node]:
    """The numbers of what is along dims, from zero."""
    return [
        walk.call(_aten.arange.default, size, device=torch.device("cpu"))
        if rows is None
        else walk.number_rows(rows)
        for rows, size in zip(dims, sizes, strict=True)
    ]


def _identity(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`eye(count)`, and with another number of columns."""
    value = node.meta["val"]
    dims = tuple(walk.rows_of_size(node, size) for size in value.shape)
    lines, columns = _numbers(walk, dims, value.shape)
    lines = walk.call(_aten.unsqueeze.default, lines, 1)
    equal = walk.call(_aten.eq.Tensor, lines, columns)
    return walk.call(_aten.to.dtype, equal, value.dtype), dims


def _triangle(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`triu` and `tril`: rows that do not count are between those that do, so numbers decide."""
    source, diagonal = arguments_of(node)[0], named_arguments(node)["diagonal"]
    dims = walk.dims_of(source)
    numbers = _numbers(walk, dims[-2:], node.meta["val"].shape[-2:])
    shifted = walk.call(_aten.add.Tensor, numbers[0], diagonal)
    shifted = walk.call(_aten.unsqueeze.default, shifted, 1)
    is_upper = target_of(node)._schema.name == "aten::triu"
    outside = walk.call((_aten.lt if is_upper else _aten.gt).Tensor, numbers[1], shifted)
    made = walk.call(_aten.masked_fill.Scalar, source, outside, 0)
    for dim in (len(dims) - 2, len(dims) - 1):
        if (rows := dims[dim]) is not None:
            made = walk.covered(made, rows, dim, len(dims))
    return made, dims


def _repeated(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`repeat`, as often as rows are chosen along dims of size one."""
    source, times = arguments_of(node)[:2]
    sizes = walk.sizes(source)
    sizes = [1] * (len(times) - len(sizes)) + sizes
    dims = [None] * (len(times) - len(walk.dims_of(source))) + list(walk.dims_of(source))
    counts = list(times)
    for place, count in enumerate(times):
        if isinstance(count, fx.Node):
            dims[place] = rows = walk.rows_of_size(node, count.meta["val"])
            assert rows is not None, "the number is a symbol"
            counts[place] = rows.size
            if sizes[place] != 1:
                raise refused(node, "is how often several are repeated")
        elif dims[place] is not None and count != 1:
            raise refused(node, "is repeated")
    return walk.call(_aten.repeat.default, source, counts), tuple(dims)


RULES_OF_SHAPES: Mapping[Any, Rule] = {
    **dict.fromkeys((*VIEWS, _aten.flatten.using_ints, _aten.unflatten.int), _viewed),
    **dict.fromkeys((_aten.squeeze.dim, _aten.squeeze.dims, _aten.squeeze.default), _viewed),
    **dict.fromkeys((_aten.view_as.default, _aten.reshape_as.default), _viewed),
    **dict.fromkeys(MOVING, _moved),
    **dict.fromkeys((_aten.expand.default, _aten.expand_as.default), _expanded),
    **dict.fromkeys(PIECES, _piece),
    **dict.fromkeys((_aten.cat.default, _aten.stack.default), _joined),
    _aten.diagonal.default: _diagonal,
    _aten.broadcast_tensors.default: _broadcast,
    **dict.fromkeys((_aten.pad.default, _aten.constant_pad_nd.default), _padded),
    operator.getitem: _item,
    "aten::arange": _numbered,
    "aten::eye": _identity,
    **dict.fromkeys((_aten.triu.default, _aten.tril.default), _triangle),
    _aten.repeat.default: _repeated,
    **{f"aten::{name}": _made for name in ("zeros", "ones", "full", "empty", "rand", "randn")},
    **{f"aten::new_{name}": _made for name in ("zeros", "ones", "full", "empty")},
}
"""By operator, or by the name of all its overloads."""
