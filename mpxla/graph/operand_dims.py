"""Which dims of an operator's operands belong together, as the letters of an einsum say it.

    linear(x [N, S, k], w [n, k], b [n])      "NSk", "nk", "n" -> "NSn"
    x [N, h, S, d] + y [h, 1, 1]              operands of elementwise operators, from the last dim

This module must not know which dims are split.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from mpxla.graph.stepgraph import CASTS
from mpxla.graph.typed import arguments_of, named_arguments, target_of

__all__ = ["MOVING", "PIECES", "PRODUCTS", "TRANSPOSED", "Combined", "combined", "dims_along"]
__all__ += ["is_elementwise", "moved_dims", "view_groups"]

_aten = torch.ops.aten


class Combined(NamedTuple):
    """Letters of the dims of operands and of the result; what is summed over is not in the result.

    In elementwise operators, letters are the numbers of the dims, counted from the last (-1).
    """

    operands: Sequence[tuple[fx.Node, Sequence[Any]]]
    result: Sequence[Any]


_UNTAGGED = frozenset(
    f"aten::{name}"
    for name in (
        *("where", "rsub", "multiply", "divide", "true_divide", "subtract", "floor_divide"),
        *("hardswish", "type_as", "absolute", "_prelu_kernel", "__and__", "__or__"),
    )
)
"""Elementwise operators that have no tag of torch that says so."""
PRODUCTS: Mapping[Any, str] = {
    _aten.linear.default: "*k, nk, n -> *n",
    _aten.addmm.default: "mn, mk, kn -> mn",
    _aten.mm.default: "mk, kn -> mn",
    _aten.bmm.default: "*mk, *kn -> *mn",
    _aten.baddbmm.default: "*mn, *mk, *kn -> *mn",
    _aten.mv.default: "mk, k -> m",
    _aten.matmul.default: "*mk, *kn -> *mn",
    _aten.scaled_dot_product_attention.default: "*sd, *td, *tv, *st -> *sv",
}
"""A star stands for all other dims, from the last of them."""
PIECES = (
    *(_aten.slice.Tensor, _aten.narrow.default, _aten.select.int, _aten.unbind.int),
    *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default, _aten.split.sizes),
)
"""Operators that give parts of a value along a dim."""
TRANSPOSED = (_aten.transpose.int, _aten.permute.default, _aten.t.default)
MOVING = (*TRANSPOSED, *CASTS, _aten.detach.default, _aten.unsqueeze.default)
"""Operators that give the same elements, with their dims in an order."""


def combined(node: fx.Node) -> Combined | None:
    """The letters of an operator that combines values; None for others."""
    target = target_of(node)
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return None
    if is_elementwise(node) or target is _aten.cat.default:
        values = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        pairs = [(n, range(-n.meta["val"].dim(), 0)) for n in values]
        return Combined(pairs, range(-result.dim(), 0))
    if target is _aten.einsum.default:
        equation, operands = arguments_of(node)[:2]
        return _of_equation(equation, operands, result)
    if target not in PRODUCTS:
        return None
    before, _, after = PRODUCTS[target].partition(" -> ")
    terms = before.split(", ")
    operands = list(named_arguments(node).values())[: len(terms)]
    if target is _aten.matmul.default:
        is_vector = [value.meta["val"].dim() == 1 for value in operands]
        terms = ["k" if v else term for v, term in zip(is_vector, terms, strict=True)]
        after = "*" + "m" * (not is_vector[0]) + "n" * (not is_vector[1])
    pairs = zip(operands, terms, strict=True)
    return Combined(
        [(n, _spelled(term, n.meta["val"].dim())) for n, term in pairs if isinstance(n, fx.Node)],
        _spelled(after, result.dim()),
    )


def dims_along(node: fx.Node, num_dims: int) -> set[int]:
    """Dims that an operator works along, of a value with so many; all, where it is told none."""
    arguments = named_arguments(node)
    if "normalized_shape" in arguments:
        return set(range(num_dims - len(arguments["normalized_shape"]), num_dims))
    given = next((arguments[name] for name in ("dim", "dims") if name in arguments), None)
    if given is None or given == []:
        return set(range(num_dims))
    return {d % num_dims for d in ([given] if isinstance(given, int) else given)}


def moved_dims(node: fx.Node) -> list[int | None]:
    """Which dim of its argument each dim of the result of a `MOVING` operator is; None for a new
    one.
    """
    target, arguments, count = target_of(node), named_arguments(node), node.meta["val"].dim()
    order: list[int | None] = [*range(count)]
    if target is _aten.unsqueeze.default:
        new = arguments["dim"] % count
        return [*order[:new], None, *order[new:-1]]
    if "dims" in arguments:
        return [dim % count for dim in arguments["dims"]]
    if target in TRANSPOSED and count > 1:
        one, other = arguments.get("dim0", -1), arguments.get("dim1", -2)
        order[one], order[other] = order[other], order[one]
    return order


def view_groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The dims of a value, and those that they become in another shape, in the smallest groups.

    At the end of a shape there may be ones alone, which nothing becomes.
    """
    start = end = 0
    while start < len(before) or end < len(after):
        stop, until = start + 1, end + 1
        while stop < len(before) or until < len(after):
            old, new = math.prod(before[start:stop]), math.prod(after[end:until])
            if old == new:
                break
            if until >= len(after) or (stop < len(before) and old < new):
                stop += 1
            else:
                until += 1
        yield range(start, min(stop, len(before))), range(end, min(until, len(after)))
        start, end = stop, until


def is_elementwise(node: fx.Node) -> bool:
    """Whether an operator takes values element by element."""
    target = target_of(node)
    name = getattr(getattr(target, "_schema", None), "name", "")
    return torch.Tag.pointwise in getattr(target, "tags", ()) or name in _UNTAGGED


def _of_equation(equation: str, operands: Sequence[fx.Node], result: torch.Tensor) -> Combined:
    before, arrow, after = equation.replace(" ", "").replace("...", "*").partition("->")
    if not arrow:
        after = "*" + "".join(sorted(c for c in before if c.isalpha() and before.count(c) == 1))
    pairs = zip(operands, before.split(","), strict=True)
    letters = [(n, _spelled(term, n.meta["val"].dim())) for n, term in pairs]
    return Combined(letters, _spelled(after, result.dim()))


def _spelled(term: str, count: int) -> list[Any]:
    """The letters of `count` dims, numbers in the place of a star; the first may be missing."""
    start, star, end = term.partition("*")
    more = range(-(count - len(start) - len(end)), 0) if star else ()
    return [*start, *more, *end][-count:] if count else []
