"""How masks, places and indices choose rows, and write to them: see `values.py`.

Where a mask or its own places read and write whole rows, nothing is moved: rows stay where they
are, and those that are not chosen are covered or kept.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from mpxla.graph.chosen.order import place_of
from mpxla.graph.chosen.values import Dims, Rows, Rule, Walk, aligned, mark_of, refused
from mpxla.graph.typed import arguments_of, input_of, named_arguments, target_of

__all__ = ["RULES_OF_PLACES", "numbered"]

_aten = torch.ops.aten


# --- masks and places ---------------------------------------------------------------------------


def _places(walk: Walk, node: fx.Node) -> tuple[fx.Node, Any]:
    """`nonzero`, `argwhere`, and `where` with one argument."""
    mask, value = input_of(node), node.meta["val"]
    shape = tuple(walk.sizes(mask))
    if any(walk.dims_of(mask)):
        raise refused(node, "is looked through for places")
    rows = walk.rows_of(mask)
    columns = walk.columns(rows, shape)
    if isinstance(value, (list, tuple)):
        walk.note(value[0].shape[0], rows)
        walk.places[node] = rows, shape, None
        return node, []
    walk.note(value.shape[0], rows)
    made = walk.call(_aten.stack.default, columns, 1)
    walk.places[made] = rows, shape, None
    return made, (rows, None)


# --- indices ------------------------------------------------------------------------------------


class _Index(NamedTuple):
    """An index of a value, with places for masks.

    Attributes:
        parts: places or None, one for each dim from the first.
        dims: what is known of the dims of the places, when they meet.
        own: the rows that the index reads in their order, where it does, and how many dims of the
            value they are.
    """

    parts: tuple[fx.Node | None, ...]
    dims: Dims
    own: tuple[Rows, int] | None


def _index_of(walk: Walk, node: fx.Node, value: fx.Node, given: Sequence[Any]) -> _Index:
    parts: list[Any] = []
    own: list[tuple[Rows, tuple[int, ...], int]] = []
    for part in given:
        if part is not None and part.meta["val"].dtype in (torch.bool, torch.uint8):
            shape = tuple(walk.sizes(part))
            rows = walk.rows_of(part)
            for dim, column in enumerate(walk.columns(rows, shape)):
                made = walk.copied(column)
                walk.set_dims(made, (rows,))
                own.append((rows, shape, dim))
                if walk.dims_of(value)[len(parts)] is not walk.dims_of(part)[dim]:
                    raise refused(node, "is read at places")
                parts.append(made)
            continue
        found = walk.places.get(part) if part is not None else None
        rows = walk.dims_of(value)[len(parts)] if part is not None else None
        if rows is None and found is not None and found[2] is not None:
            own.append((found[0], found[1], found[2]))
        if part is not None and rows is not None:
            part = numbered(walk, rows, part)
            if walk.numbering.get(part) is rows:
                own.append((rows, (rows.size,), 0))
        parts.append(part)
    used = [p for p in parts if p is not None]
    num_dims = max(len(walk.dims_of(p)) or p.meta["val"].dim() for p in used)
    dims = aligned(walk, node, used, num_dims)
    return _Index(tuple(parts), dims, _own_rows(walk, value, parts, own))


def numbered(walk: Walk, rows: Rows, numbers: fx.Node) -> fx.Node:
    """The places of rows that are read or written by their numbers."""
    if walk.numbering.get(numbers) is rows:
        made = walk.copied(walk.safe_places(rows), numbers.meta["val"])
        walk.numbering[made] = rows
    else:
        made = place_of(walk, rows, numbers)
        made.meta["val"] = numbers.meta["val"]
    walk.set_dims(made, walk.dims_of(numbers))
    return made


def _own_rows(
    walk: Walk, value: fx.Node, parts: Sequence[Any], own: Sequence[Any]
) -> tuple[Rows, int] | None:
    """The rows of an index that is all their places along the first dims, in order."""
    used = [place for place, part in enumerate(parts) if part is not None]
    if not own or len(own) != len(used) or used != list(range(len(used))):
        return None
    rows, shape, _ = own[0]
    in_order = [(rows, shape, dim) for dim in range(len(shape))]
    if list(own) != in_order or list(shape) != walk.sizes(value)[: len(shape)]:
        return None
    return rows, len(shape)


def _flattened(walk: Walk, value: fx.Node, sizes: Sequence[int], num_dims: int) -> fx.Node:
    """The value with its first dims as one."""
    if num_dims == 1:
        return value
    return walk.call(_aten.reshape.default, value, [-1, *sizes[num_dims:]])


def _read(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`index`: `value[places]`."""
    value, given = arguments_of(node)
    index = _index_of(walk, node, value, given)
    _note_count(walk, node, index)
    dims = walk.dims_of(value)
    if index.own is not None:
        rows, count = index.own
        flat = _flattened(walk, value, walk.sizes(value), count)
        rest = dims[count:]
        return walk.chosen_from(flat, rows, node), (rows, *rest)
    used = [place for place, part in enumerate(index.parts) if part is not None]
    others = [dims[d] for d in range(len(dims)) if d not in used]
    is_together = used == list(range(used[0], used[-1] + 1))
    place = used[0] if is_together else 0
    made = walk.call(_aten.index.Tensor, value, list(index.parts))
    return made, (*others[:place], *index.dims, *others[place:])


def _note_count(walk: Walk, node: fx.Node, index: _Index) -> None:
    """Tells which rows a new number counts."""
    sizes = [s for s in node.meta["val"].shape if isinstance(s, torch.SymInt)]
    rows = [rows for rows in index.dims if rows is not None]
    if len(sizes) == len(rows) == 1:
        walk.note(sizes[0], rows[0])


def _written(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`index_put`: `value[places] = new`, or `+=`."""
    value, given, new = arguments_of(node)[:3]
    adds = bool(named_arguments(node)["accumulate"])
    index, dims = _index_of(walk, node, value, given), walk.dims_of(value)
    known = walk.dims_of(new)
    if index.own is not None:
        rows, count = index.own
        rest = dims[count:]
        flat = _flattened(walk, value, walk.sizes(value), count)
        new = _one_by_one(walk, new, rows, 1 + len(rest))
        _check_meets(node, (rows, *rest), walk.dims_of(new))
        if adds:
            new = walk.call(_aten.add.Tensor, flat, new)
        mask = walk.along(rows.mask, 0, 1 + len(rest))
        made = walk.call(_aten.where.self, mask, new, flat)
        made = walk.call(_aten.reshape.default, made, walk.sizes(value))
        return _covered(walk, made, dims, range(count)), dims
    used = [place for place, part in enumerate(index.parts) if part is not None]
    rows = next((rows for rows in index.dims if rows is not None), None)
    is_of_first = not index.dims or (index.dims[0] is rows and not any(index.dims[1:]))
    if not is_of_first or any(dims[d] for d in range(len(dims)) if d not in used):
        raise refused(node, "is written at places")
    if used != list(range(len(used))):
        raise refused(node, "is written at places of another dim than the first")
    num_dims = len(index.dims) + len(dims) - len(used)
    _check_meets(node, (*index.dims, *[None] * (len(dims) - len(used))), known)
    parts = list(index.parts)
    if rows is not None:
        new = _expanded(walk, new, rows, num_dims)
        parts = [None if part is None else _of_first(walk, part, rows) for part in parts]
    if rows is not None and adds:
        absent = walk.along(walk.absent(rows), 0, num_dims)
        new = walk.call(_aten.masked_fill.Scalar, new, absent, 0)
    elif rows is not None:
        new = walk.covered(new, rows, 0, num_dims)

    def write(value: fx.Node, places: Mapping[int, Any]) -> fx.Node:
        return walk.call(_aten.index_put.default, value, list(places.values()), new, adds)

    return _put(walk, value, rows, {d: parts[d] for d in used}, write), dims


def _put(
    walk: Walk,
    value: fx.Node,
    rows: Rows | None,
    places: Mapping[int, Any],
    write: Callable[[fx.Node, Mapping[int, Any]], fx.Node],
) -> fx.Node:
    """What becomes of a value when `write` writes to places along some of its dims.

    Of rows that are written, those that do not count write what the first that does writes, to its
    place; nothing is written where none counts. All is marked where places are beyond the rows that
    are written to: PyTorch raises.
    """
    dims, dtype = walk.dims_of(value), value.meta["val"].dtype
    safe, wrong = dict(places), list[fx.Node]()
    for d, place in places.items():
        is_fine = None if rows is None else walk.some(rows)
        if dims[d] is not None:
            is_fine = walk.call(_aten.ne.Scalar, place, mark_of(torch.int64))
            wrong.append(walk.call(_aten.all.default, is_fine))
        if is_fine is not None:
            safe[d] = walk.call(_aten.where.ScalarOther, is_fine, place, 0)
    made = write(value, safe)
    for is_fine in wrong if dtype is not torch.bool else ():
        is_wrong = walk.call(_aten.logical_not.default, is_fine)
        made = walk.call(_aten.masked_fill.Scalar, made, is_wrong, mark_of(dtype))
    if rows is not None:
        made = walk.call(_aten.where.self, walk.some(rows), made, value)
    return _covered(walk, made, dims, places)


def _covered(walk: Walk, made: fx.Node, dims: Dims, written: Iterable[int]) -> fx.Node:
    """Rows of a value that do not count hold what one of those that do holds now."""
    for d in written:
        if (rows := dims[d]) is not None:
            made = walk.covered(made, rows, d, len(dims))
    return made


def _expanded(walk: Walk, new: fx.Node, rows: Rows, num_dims: int) -> fx.Node:
    """A value to write, with a row for each that is written."""
    shape = walk.sizes(new)
    if len(shape) == num_dims and shape[0] == rows.size:
        return new
    shape = [1] * (num_dims - len(shape)) + shape
    new = walk.call(_aten.reshape.default, new, shape)
    return walk.call(_aten.expand.default, new, [rows.size, *shape[1:]])


def _of_first(walk: Walk, part: fx.Node, rows: Rows) -> fx.Node:
    known = walk.dims_of(part)
    if not known or known[0] is not rows:
        return part
    return walk.covered(part, rows, 0, len(known))


def _one_by_one(walk: Walk, new: fx.Node, rows: Rows, num_dims: int) -> fx.Node:
    """What is written to rows: the first row of another mask to the first one, and so on. Where
    those are more or fewer, all is marked: PyTorch raises.
    """
    known = walk.dims_of(new)
    given = known[0] if len(known) == num_dims else None
    if given is None or given is rows:
        return new
    places = walk.call(_aten.index.Tensor, walk.in_order(given), [_within(walk, rows, given)])
    made = walk.call(_aten.index_select.default, new, 0, places)
    counts = (walk.call(_aten.sum.default, r.mask) for r in (rows, given))
    differ = walk.call(_aten.ne.Tensor, *counts)
    dtype = new.meta["val"].dtype
    if dtype is not torch.bool:
        made = walk.call(_aten.masked_fill.Scalar, made, differ, mark_of(dtype))
    made.meta["val"] = new.meta["val"]
    walk.set_dims(made, (rows, *known[1:]))
    return made


def _within(walk: Walk, rows: Rows, given: Rows) -> fx.Node:
    return walk.call(_aten.clamp_max.default, walk.number_rows(rows), given.size - 1)


def _filled_in_order(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`masked_scatter`: the first element of the rows goes to where the mask is true first."""
    value, mask, new = arguments_of(node)
    known, shape = walk.dims_of(new), walk.sizes(value)
    if any(walk.dims_of(value)) or any(walk.dims_of(mask)) or any(known[1:]):
        raise refused(node, "is written at places")
    rows, sizes = known[0], walk.sizes(new)
    assert rows is not None, "else the node has nothing to do with rows"
    count = len(shape) - len(sizes) + 1
    base = mask.all_input_nodes[0] if mask.target is _aten.expand.default else mask
    is_whole = walk.sizes(base) == [*shape[:count], *[1] * len(sizes[1:])]
    if is_whole and sizes[1:] == shape[count:] and walk.rows_of(base) is rows:
        flat = _flattened(walk, value, shape, count)
        made = walk.call(_aten.where.self, walk.along(rows.mask, 0, len(sizes)), new, flat)
        return walk.call(_aten.reshape.default, made, shape), ()
    new = walk.call(_aten.index_select.default, new, 0, walk.in_order(rows))
    rank = walk.call(_aten.arange.default, rows.size, device=torch.device("cpu"))
    # Where the mask is true more often than there are elements, PyTorch raises.
    missing = walk.call(_aten.ge.Tensor, rank, walk.call(_aten.sum.default, rows.mask))
    missing = walk.along(missing, 0, len(sizes))
    new = walk.call(_aten.masked_fill.Scalar, new, missing, mark_of(value.meta["val"].dtype))
    return walk.call(target_of(node), value, mask, new), ()


def _check_meets(node: fx.Node, dims: Dims, known: Dims) -> None:
    """Checks that rows that are written are those of the places."""
    for one, other in zip(reversed(known), reversed(dims), strict=False):
        if one is not None and one is not other:
            raise refused(node, "meets what another mask has as many rows of")


def _written_along(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`index_add` and `index_copy`: rows along a dim."""
    value, dim, index, new = arguments_of(node)[:4]
    dims, (rows,) = walk.dims_of(value), walk.dims_of(index) or (None,)
    dim %= len(dims)
    known = walk.dims_of(new)
    adds = target_of(node)._schema.name == "aten::index_add"
    scale = named_arguments(node).get("alpha", 1)
    if dims[dim] is not None and adds:
        return _added_to_rows(walk, node, dims[dim], dim), dims
    if known[dim] is not rows:
        raise refused(node, "is written at places")
    found = walk.places.get(index)
    is_own = found is not None and found[1] == (walk.sizes(value)[dim],)
    _check_meets(node, (*dims[:dim], rows, *dims[dim + 1 :]), known)
    if rows is None and dims[dim] is None:
        return node, dims
    if rows is None or dims[dim] is not None:
        return _copied(walk, node, dim, rows), dims
    if adds:
        new = walk.filled(new, known, 0, (dim,))
        if is_own:
            return walk.call(_aten.add.Tensor, value, new, alpha=scale), dims
        return walk.call(target_of(node), value, dim, index, new, alpha=scale), dims
    if is_own:
        mask = walk.along(rows.mask, dim, len(dims))
        return walk.call(_aten.where.self, mask, new, value), dims
    return _copied(walk, node, dim, rows), dims


def _copied(walk: Walk, node: fx.Node, dim: int, rows: Rows | None) -> fx.Node:
    """`index_copy` and `scatter`: some rows, or all that there is, in the place of others."""
    value, _, index, new = arguments_of(node)[:4]
    dims = walk.dims_of(value)
    if (written := dims[dim]) is not None:
        index = numbered(walk, written, index)
    if rows is not None:
        num_dims = index.meta["val"].dim()
        index = walk.covered(index, rows, dim if num_dims == len(dims) else 0, num_dims)
        if isinstance(new, fx.Node):
            new = walk.covered(new, rows, dim, len(dims))

    def write(value: fx.Node, places: Mapping[int, Any]) -> fx.Node:
        return walk.call(target_of(node), value, dim, places[dim], new)

    return _put(walk, value, rows, {dim: index}, write)


def _added_to_rows(walk: Walk, node: fx.Node, written: Rows, dim: int) -> fx.Node:
    """`index_add` and `scatter_add` to rows that are chosen, by their numbers."""
    value, _, index, new = arguments_of(node)[:4]
    dims, known = walk.dims_of(value), walk.dims_of(new)
    rows = walk.dims_of(index)[-1 if len(walk.dims_of(index)) == 1 else dim]
    if known[dim] is not rows or known[:dim] + known[dim + 1 :] != dims[:dim] + dims[dim + 1 :]:
        raise refused(node, "is written at places")
    new = walk.filled(new, known, 0, (dim,))
    index = numbered(walk, written, index)
    made = walk.call(target_of(node), value, dim, index, new, **node.kwargs)
    return walk.covered(made, written, dim, len(dims))


def _scattered(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`scatter_add`, and other scatters along dims whose rows all count."""
    value, dim, index = arguments_of(node)[:3]
    dims, known = walk.dims_of(value), walk.dims_of(index)
    dim %= len(dims)
    new = arguments_of(node)[3]
    rows, rest = known[dim], known[:dim] + known[dim + 1 :]
    if dims[dim] is not None and target_of(node) is _aten.scatter_add.default:
        return _added_to_rows(walk, node, dims[dim], dim), dims
    if rest != dims[:dim] + dims[dim + 1 :]:
        raise refused(node, "is written at places")
    if rows is None and dims[dim] is None:
        return node, dims
    if isinstance(new, fx.Node) and walk.dims_of(new) != known:
        raise refused(node, "is written at places")
    if target_of(node) is _aten.scatter_add.default:
        node.args = (value, dim, index, walk.filled(new, known, 0, (dim,)))
        return node, dims
    if target_of(node) not in (_aten.scatter.src, _aten.scatter.value):
        raise refused(node, "is written at places")
    return _copied(walk, node, dim, rows), dims


def _written_at(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`x[..., 0] = y`, and `x[..., 1:] = y` along a dim whose rows all count."""
    value, new = arguments_of(node)[:2]
    dims, dim = walk.dims_of(value), named_arguments(node)["dim"] % node.meta["val"].dim()
    is_slice = target_of(node) is _aten.slice_scatter.default
    if walk.dims_of(new) != (dims if is_slice else dims[:dim] + dims[dim + 1 :]):
        raise refused(node, "is written at places")
    if (rows := dims[dim]) is None:
        return node, dims
    if is_slice:
        raise refused(node, "is written at places")
    number = walk.call(
        _aten.full.default,
        [1],
        arguments_of(node)[3],
        dtype=torch.int64,
        device=torch.device("cpu"),
    )
    place = place_of(walk, rows, number)
    new = walk.call(_aten.unsqueeze.default, new, dim)

    def write(value: fx.Node, places: Mapping[int, Any]) -> fx.Node:
        return walk.call(_aten.index_copy.default, value, dim, places[dim], new)

    return _put(walk, value, None, {dim: place}, write), dims


def _gathered(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`gather`, and `index_select`."""
    value, dim, index = arguments_of(node)[:3]
    dims, known = list(walk.dims_of(value)), walk.dims_of(index)
    dim %= max(1, len(dims))
    if not dims or not known:
        raise refused(node, "is read at places")
    rows = dims[dim]
    if rows is not None:
        node.args = (value, dim, numbered(walk, rows, index))
    if target_of(node) is _aten.index_select.default:
        dims[dim] = known[0]
        return node, tuple(dims)
    pairs = enumerate(zip(dims, known, strict=True))
    if any(one is not other for d, (one, other) in pairs if d != dim):
        raise refused(node, "meets what another mask has as many rows of")
    return node, known


RULES_OF_PLACES: Mapping[Any, Rule] = {
    **dict.fromkeys((_aten.nonzero.default, _aten.nonzero_numpy.default), _places),
    **dict.fromkeys((_aten.argwhere.default, _aten.where.default), _places),
    _aten.index.Tensor: _read,
    _aten.index_put.default: _written,
    **dict.fromkeys(("aten::index_add", "aten::index_copy"), _written_along),
    **dict.fromkeys(("aten::scatter_add", "aten::scatter"), _scattered),
    **dict.fromkeys((_aten.select_scatter.default, _aten.slice_scatter.default), _written_at),
    _aten.masked_scatter.default: _filled_in_order,
    **dict.fromkeys((_aten.gather.default, _aten.index_select.default), _gathered),
}
"""By operator, or by the name of all its overloads."""
