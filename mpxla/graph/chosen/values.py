"""Rows that a mask of a step chooses, as values of a fixed size in which some rows count.

    h[mask], nonzero(mask)        [count of the mask, ...], which no program can have
    here                          [elements of the mask, ...], and the mask

Rows that are not there hold what one of the chosen rows holds, so that nothing computed row by row
gets values that the user's code does not see. Where rows meet, in a sum or a write, they are left
out. `rules.py` and `places.py` say how for each operator; others are refused.

This module must not know how a step is traced.
"""

import functools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mpxla.graph.chosen.arithmetic import ARITHMETIC, HERE, POWERS
from mpxla.graph.split import ancestors
from mpxla.graph.stepgraph import VIEWS, describe, is_random
from mpxla.graph.typed import SYMBOLIC, origin_of, outputs_of, symbolic_numbers
from mpxla.graph.user_code import ValueNeededError, line_of
from mpxla.log import warn_once

__all__ = [
    "Dims",
    "Rows",
    "Rule",
    "Walk",
    "aligned",
    "fix_sizes",
    "fixed_sizes",
    "limit_of",
    "mark_of",
    "met",
    "of_each",
    "refused",
]

_aten = torch.ops.aten


@dataclass(eq=False)
class Rows:
    """The rows of a dim that are there.

    Attributes:
        mask: bool [size].
        size: how many there are with those that do not count.
        parts: of a dim that is several dims made one: size or rows of each.
        is_asked: whether the step has asked if there are any, so that its way with none may be
            another.
    """

    mask: fx.Node
    size: int
    parts: "tuple[int | Rows, ...]" = ()
    is_asked: bool = False
    made: dict[str, Any] = field(default_factory=dict)
    """What has been computed from the mask."""


Dims = tuple["Rows | None", ...]
"""What is known of each dim of a value."""
Rule = Callable[["Walk", fx.Node], "tuple[fx.Node, Any]"]
"""Gives the node to stand for one, and its dims (a list of them for several values)."""


def fix_sizes(
    graph: fx.Graph,
    rule_of: Callable[[fx.Node], Rule | None],
    asked: Sequence[fx.Node],
    fake_mode: FakeTensorMode,
) -> None:
    """Gives every value of a graph a size that does not depend on values, in place.

    Args:
        graph: functional; sizes that depend on values are symbols in the values of its nodes.
        rule_of: says how a node treats rows.
        asked: masks of which the step asks whether they are true anywhere.
        fake_mode: of the values that new nodes get.

    Raises:
        ValueNeededError: something would need the number of rows, or their order.
    """
    if not any(map(symbolic_numbers, graph.nodes)):
        return
    walk = Walk(graph, asked, fake_mode)
    for node in list(graph.nodes):
        if node.op == "call_function":
            walk.visit(node, rule_of)
    output = graph.output_node()
    for node in outputs_of(graph):
        if isinstance(node, fx.Node) and any(walk.dims_of(node)):
            raise refused(node, "is a result of the step: return values of a fixed size")
    output.args = (tuple(walk.as_number(v, output) for v in outputs_of(graph)),)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), SYMBOLIC):
            user = next(iter(node.users))
            raise refused(user, "decides a size, or another number that it takes")
    for line, size in walk.chosen.items():
        warn_once(
            f"rows chosen{line}",
            f"how many rows are chosen{line} depends on values, and a compiled step has fixed "
            f"shapes: what follows is computed for all {size} rows, and those that are not chosen "
            f"are left out of sums and writes.",
        )


def aligned(walk: "Walk", node: fx.Node, values: Sequence[Any], num_dims: int) -> Dims:
    """What is known of the dims of values that meet element by element."""
    return met(node, map(walk.dims_of, values), num_dims)


def met(node: fx.Node, several: Iterable[Dims], num_dims: int) -> Dims:
    """What is known of dims that meet, from the last."""
    found: list[Rows | None] = [None] * num_dims
    for dims in several:
        for place, rows in enumerate(dims, num_dims - len(dims)):
            if rows is not None and found[place] not in (None, rows):
                raise refused(node, "meets what another mask has as many rows of")
            found[place] = rows or found[place]
    return tuple(found)


def fixed_sizes(shape: Sequence[Any], dims: Sequence[Rows | None]) -> list[Any]:
    """A shape with the fixed sizes of dims whose rows are known."""
    pairs = zip(shape, dims, strict=True)
    return [size if rows is None else rows.size for size, rows in pairs]


def of_each(node: fx.Node, dims: Dims) -> tuple[fx.Node, Any]:
    """A node as it is, with the same dims for each of its values if it gives several."""
    value = node.meta["val"]
    return node, [dims] * len(value) if isinstance(value, (list, tuple)) else dims


def limit_of(dtype: torch.dtype, sign: int) -> float:
    """The greatest value of a type, or the least one."""
    if dtype.is_floating_point:
        return sign * math.inf
    if dtype is torch.bool:
        return sign > 0
    return torch.iinfo(dtype).max if sign > 0 else torch.iinfo(dtype).min


def mark_of(dtype: torch.dtype) -> float:
    """What stands where PyTorch raises: NaN, or a place beyond all tables, of which programs make
    NaN.
    """
    is_float = dtype.is_floating_point or dtype.is_complex
    return math.nan if is_float else torch.iinfo(dtype).max


def refused(node: fx.Node, what: str = "") -> ValueNeededError:
    """The error for a node, and what becomes there of rows that a mask has chosen."""
    rows = f" What has as many rows as a mask is true {what}." if what else ""
    return ValueNeededError(
        f"{describe(node)}: the shape of its result, or the way it goes on, depends on values."
        f"{rows} A step is captured once, with fixed shapes: use a mask and torch.where, `topk` "
        f"with a fixed number or `torch.nonzero_static`, or do it before the step function and "
        f"pass the result in."
    )


def _once(method: Callable[["Walk", Rows], fx.Node]) -> Callable[["Walk", Rows], fx.Node]:
    """Keeps with the rows what has been computed from their mask."""

    @functools.wraps(method)
    def call(self: "Walk", rows: Rows) -> fx.Node:
        if method.__name__ not in rows.made:
            rows.made[method.__name__] = method(self, rows)
        return rows.made[method.__name__]

    return call


class Walk:
    """Goes over the nodes of a graph in their order.

    Attributes:
        chosen: the user's lines where masks choose rows, and of how many.
        places: values that are places of chosen rows in a mask -> the rows, the shape of the mask,
            and along which of its dims; None for all dims, as columns.
        numbering: values that number the chosen rows from zero.
        parts: nodes that give several values -> the nodes that stand for those.
    """

    def __init__(
        self, graph: fx.Graph, asked: Sequence[fx.Node], fake_mode: FakeTensorMode
    ) -> None:
        self._graph, self._fake_mode = graph, fake_mode
        self._asked = asked
        self._dims: dict[fx.Node, Any] = {}
        self._rows: dict[Any, Rows] = {}
        self._of_symbol: dict[sympy.Expr, Rows | None] = {}
        self._same: dict[Any, fx.Node] = {}
        self._key: dict[fx.Node, Any] = {}
        self._now: fx.Node | None = None
        self.chosen: dict[str, int] = {}
        self.places: dict[fx.Node, tuple[Rows, tuple[int, ...], int | None]] = {}
        self.numbering: dict[fx.Node, Rows] = {}
        self.parts: dict[fx.Node, list[fx.Node]] = {}

    # --- nodes --------------------------------------------------------------------------------

    def visit(self, node: fx.Node, rule_of: Callable[[fx.Node], Rule | None]) -> None:
        """Puts values of fixed size in the place of what a node gives."""
        value = node.meta.get("val")
        if isinstance(value, SYMBOLIC):
            return  # numbers are computed where they are used
        has_rows = any(self._dims.get(n) is not None for n in node.all_input_nodes)
        if not (has_rows or any(map(symbolic_numbers, (node, *node.all_input_nodes)))):
            return
        self._now = node
        rule = rule_of(node)
        if rule is None:
            what = "meets an operator that is not known to treat rows one by one"
            raise refused(node, what if has_rows else "")
        with self._graph.inserting_before(node):
            made, dims = rule(self, node)
        if isinstance(value, torch.Tensor) and dims and len(dims) != value.dim():
            raise refused(node, "has another shape than torch says")
        if isinstance(dims, list) or any(dims):
            self._dims[made] = dims
        if made is not node:
            made.meta = {**node.meta, **made.meta}
            node.replace_all_uses_with(made)
            self._graph.erase_node(node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node before the one that is visited, from the same line."""
        node = self._graph.call_function(target, args, kwargs)
        assert self._now is not None, "nodes are visited"
        node.meta = origin_of(self._now, "custom")
        return node

    def copied(self, node: fx.Node, value: torch.Tensor | None = None) -> fx.Node:
        """A node for the same value, of which other things can be known."""
        made = self.call(_aten.clone.default, node)
        made.meta["val"] = node.meta["val"] if value is None else value
        return made

    def dims_of(self, value: Any) -> Dims:
        """What is known of the dims of a value."""
        if not isinstance(value, fx.Node):
            return ()
        found = self._dims.get(value)
        if found is None:
            known = value.meta.get("val")
            return (None,) * known.dim() if isinstance(known, torch.Tensor) else ()
        return found

    def set_dims(self, node: fx.Node, dims: Dims) -> None:
        """Makes known what a new node has."""
        self._dims[node] = dims

    def item_of(self, node: fx.Node, item: int) -> Dims:
        """The dims of one of the values that a node gives."""
        found = self._dims.get(node)
        return () if found is None else found[item]

    # --- rows ---------------------------------------------------------------------------------

    def rows_of(self, mask: fx.Node) -> Rows:
        """The rows that a mask chooses: the same ones for masks that are computed the same way."""
        dims = self.dims_of(mask)
        shape = tuple(self.sizes(mask))
        source = mask if any(dims) else _source(mask)
        key = self._key_of(source), math.prod(shape)
        if key not in self._rows:
            is_asked = key[0] in map(self._key_of, map(_source, self._asked))
            if mask.meta["val"].dtype is not torch.bool:
                mask = self.call(_aten.ne.Scalar, mask, 0)
            flat = self.call(_aten.reshape.default, self.filled(mask, dims, False), [-1])
            self._rows[key] = Rows(flat, math.prod(shape), is_asked=is_asked)
            self.chosen[line_of(self._now) if self._now else ""] = math.prod(shape)
        return self._rows[key]

    def merged(self, parts: Sequence["int | Rows"]) -> Rows:
        """The rows of several dims that become one."""
        key = tuple(parts)
        if key not in self._rows:
            sizes = [p if isinstance(p, int) else p.size for p in parts]
            mask: fx.Node | None = None
            for place, part in enumerate(parts):
                if isinstance(part, int):
                    continue
                ones = [1] * (len(parts) - place - 1)
                wide = self.call(_aten.reshape.default, part.mask, [part.size, *ones])
                wide = self.call(_aten.expand.default, wide, sizes)
                mask = wide if mask is None else self.call(_aten.logical_and.default, mask, wide)
            flat = self.call(_aten.reshape.default, mask, [-1])
            size = math.prod(sizes)
            self._rows[key] = Rows(flat, size, key)
        return self._rows[key]

    def joined(self, parts: Sequence["int | Rows"]) -> Rows:
        """The rows of several dims one after the other."""
        key = "joined", *parts
        if key not in self._rows:
            masks = [
                self.call(_aten.full.default, [p], True, dtype=torch.bool, **HERE)
                if isinstance(p, int)
                else p.mask
                for p in parts
            ]
            size = sum(p if isinstance(p, int) else p.size for p in parts)
            self._rows[key] = Rows(self.call(_aten.cat.default, masks), size)
        return self._rows[key]

    def note(self, size: Any, rows: Rows, is_counted: bool = False) -> None:
        """Makes rows those of which there are so many, unless others are too; those stay the ones
        that count where the number was counted before.
        """
        if isinstance(size, torch.SymInt):
            known = self._of_symbol.setdefault(size.node.expr, rows)
            if known is not rows and not is_counted:
                self._of_symbol[size.node.expr] = None

    def rows_of_size(self, node: fx.Node, size: Any) -> Rows | None:
        """The rows of which there are so many; none for a number."""
        if not isinstance(size, torch.SymInt):
            return None
        found = self._of_symbol.get(size.node.expr)
        if found is None:
            raise refused(node, "decides a size in a way that is not known here")
        return found

    @_once
    def absent(self, rows: Rows) -> fx.Node:
        """bool [size], true for rows that do not count."""
        return self.call(_aten.logical_not.default, rows.mask)

    @_once
    def some(self, rows: Rows) -> fx.Node:
        """bool [], whether a row counts."""
        return self.call(_aten.any.default, rows.mask)

    @_once
    def first(self, rows: Rows) -> fx.Node:
        """int64 [1], the first row that counts; the first one where none does."""
        numbers = self.call(_aten.to.dtype, rows.mask, torch.int32)
        return self.call(_aten.reshape.default, self.call(_aten.argmax.default, numbers), [1])

    @_once
    def count(self, rows: Rows) -> fx.Node:
        """int64 [], how many rows count; one for none, if the step has another way with none."""
        made = self.call(_aten.sum.default, rows.mask)
        if rows.is_asked:
            made = self.call(_aten.clamp_min.default, made, 1)
        made.meta["val"] = self._scalar(torch.int64)
        return made

    @_once
    def number_rows(self, rows: Rows) -> fx.Node:
        """int64 [size], the number of each row among those that count."""
        sums = self.call(_aten.cumsum.default, rows.mask, 0)
        return self.call(_aten.clamp_min.default, self.call(_aten.sub.Tensor, sums, 1), 0)

    @_once
    def in_order(self, rows: Rows) -> fx.Node:
        """int64 [size], the places of those that count, one after the other."""
        absent = self.call(_aten.to.dtype, self.absent(rows), torch.int32)
        return self.call(_aten.argsort.stable, absent, stable=True)

    @_once
    def safe_places(self, rows: Rows) -> fx.Node:
        """int64 [size], each row's own place, and the first one's for those that do not count."""
        own = self.call(_aten.arange.default, rows.size, **HERE)
        return self.call(_aten.where.self, rows.mask, own, self.first(rows))

    def columns(self, rows: Rows, shape: Sequence[int]) -> list[fx.Node]:
        """The places of rows in a mask of a shape that chooses them, along each of its dims."""
        name = f"columns of {list(shape)}"
        if name not in rows.made:
            columns: list[fx.Node] = []
            step = rows.size
            for size in shape:
                step //= size
                column = self.safe_places(rows)
                if step > 1:
                    column = self.call(_aten.div.Tensor_mode, column, step, rounding_mode="floor")
                if size * step < rows.size:
                    column = self.call(_aten.remainder.Scalar, column, size)
                with self._fake_mode:
                    column.meta["val"] = torch.empty(rows.size, dtype=torch.int64)
                columns.append(column)
            rows.made[name] = columns
        return rows.made[name]

    # --- values -------------------------------------------------------------------------------

    def sizes(self, node: fx.Node) -> list[int]:
        """The fixed shape of a value."""
        return fixed_sizes(node.meta["val"].shape, self.dims_of(node))

    def along(self, mask: fx.Node, dim: int, num_dims: int) -> fx.Node:
        """A mask of rows, so that it meets the rows of a value along a dim of it."""
        ones = num_dims - dim % num_dims - 1
        return self.call(_aten.reshape.default, mask, [-1, *[1] * ones]) if ones else mask

    def filled(
        self, value: fx.Node, dims: Dims, fill: float | bool, along: Container[int] | None = None
    ) -> fx.Node:
        """A value with a number in the rows that do not count, of all dims or of some."""
        for dim, rows in enumerate(dims):
            if rows is not None and (along is None or dim in along):
                absent = self.along(self.absent(rows), dim, len(dims))
                value = self.call(_aten.masked_fill.Scalar, value, absent, fill)
        return value

    def chosen_from(self, value: fx.Node, rows: Rows, node: fx.Node) -> fx.Node:
        """The rows of a value that a node reads, along the first dim."""
        num_dims, dtype = node.meta["val"].dim(), node.meta["val"].dtype
        made = self.covered(value, rows, 0, num_dims)
        if not dtype.is_floating_point:
            return made
        # Where no row counts, the first row may be one that the code after this is not made for
        # (a logarithm, say); zero times NaN would be the gradient of a weight.
        ones = self.call(_aten.ones_like.default, made)
        return self.call(_aten.where.self, self.some(rows), made, ones)

    def covered(self, value: fx.Node, rows: Rows, dim: int, num_dims: int) -> fx.Node:
        """A value with the first row that counts in the place of those that do not."""
        kept = self.call(_aten.detach.default, value)
        first = self.call(_aten.index_select.default, kept, dim, self.first(rows))
        mask = self.along(rows.mask, dim, num_dims)
        return self.call(_aten.where.self, mask, value, first)

    def settled(self, mean: fx.Node, rows: Rows) -> fx.Node:
        """A mean over rows; of none it is zero, not NaN, if the step has another way with none."""
        if not rows.is_asked:
            return mean
        zero = self.call(_aten.zeros_like.default, mean)
        return self.call(_aten.where.self, self.some(rows), mean, zero)

    def marked(self, value: fx.Node, rows: Rows, dtype: torch.dtype) -> fx.Node:
        """A row, which is there only if there are rows: else a mark."""
        if dtype is torch.bool:
            return value
        none = self.call(_aten.logical_not.default, self.some(rows))
        return self.call(_aten.masked_fill.Scalar, value, none, mark_of(dtype))

    # --- numbers ------------------------------------------------------------------------------

    def as_size(self, value: Any) -> Any:
        """The fixed size in the place of a number that depends on values."""
        rows = self.rows_of_size(value, value.meta["val"]) if _is_number(value) else None
        return value if rows is None else rows.size

    def as_number(self, value: Any, node: fx.Node) -> Any:
        """The tensor in the place of a number that depends on values."""
        if not _is_number(value):
            return value
        with self._graph.inserting_before(node):
            self._now = node
            made = self._computed(value.meta["val"].node.expr, value)
        if not isinstance(made, fx.Node):
            made = self.call(_aten.scalar_tensor.default, made, **HERE)
        is_integer = isinstance(value.meta["val"], torch.SymInt)
        made.meta.setdefault("val", self._scalar(torch.int64 if is_integer else torch.float64))
        return made

    def _computed(self, expr: Any, value: fx.Node) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Number:
            return float(expr)
        if expr in self._of_symbol:
            rows = self._of_symbol[expr]
            if rows is None:
                raise refused(value, "is counted where several masks are true as often")
            return self.count(rows)
        operands = [self._computed(part, value) for part in expr.args]
        name = type(expr).__name__
        if name == "ToFloat":
            return self.call(_aten.to.dtype, operands[0], torch.float64)
        if name not in ARITHMETIC or (name in POWERS and not isinstance(operands[0], fx.Node)):
            raise refused(value, f"is counted, and computed with by {name}")
        found = operands[0]
        for other in operands[1:]:
            found = ARITHMETIC[name](self.call, found, other)
        return found

    def _scalar(self, dtype: torch.dtype) -> torch.Tensor:
        with self._fake_mode:
            return torch.empty((), dtype=dtype)

    # --- what is the same ---------------------------------------------------------------------

    def _key_of(self, node: fx.Node) -> Any:
        """Equal for nodes that compute the same from the same."""
        for source in sorted(ancestors([node], self._key.__contains__) - self._key.keys()):
            self._key[source] = source
            if source.op == "call_function" and not is_random(source):
                arguments = fx.map_arg((source.args, source.kwargs), lambda n: self._key[n])
                text = (source.target, repr(arguments))
                self._key[source] = self._same.setdefault(text, source)
        return self._key[node]


def _source(mask: fx.Node) -> fx.Node:
    """What a mask has the elements of, in another shape."""
    while mask.target in VIEWS:
        mask = mask.all_input_nodes[0]
    return mask


def _is_number(value: Any) -> bool:
    known = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(known, (torch.SymInt, torch.SymFloat))
