"""How operators treat values in which only some rows count: see `values.py`.

A rule gives the node to stand for one of the graph, and what is known of the dims of its result.
Operators that no table names are refused.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from mpxla.graph.chosen.order import RULES_OF_ORDER, extreme_or
from mpxla.graph.chosen.places import RULES_OF_PLACES, numbered
from mpxla.graph.chosen.shapes import RULES_OF_SHAPES
from mpxla.graph.chosen.values import (
    Dims,
    Rows,
    Rule,
    Walk,
    aligned,
    limit_of,
    met,
    of_each,
    refused,
)
from mpxla.graph.operand_dims import PRODUCTS, combined, dims_along, is_elementwise
from mpxla.graph.recurrent import LAYER
from mpxla.graph.typed import (
    SYMBOLIC,
    arguments_of,
    input_of,
    named_arguments,
    schema_of,
    target_of,
)

__all__ = ["rule_of"]

_aten = torch.ops.aten


def _changed(node: fx.Node, **arguments: Any) -> fx.Node:
    """The node with other arguments."""
    given = named_arguments(node) | arguments
    schema = target_of(node)._schema.arguments
    node.args = tuple(given[a.name] for a in schema if not a.kwarg_only)
    node.kwargs = {a.name: given[a.name] for a in schema if a.kwarg_only}
    return node


# --- element by element -------------------------------------------------------------------------


def _elementwise(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    dims = aligned(walk, node, node.all_input_nodes, node.meta["val"].dim())
    value = node.meta["val"]
    others = [n.meta["val"] for n in node.all_input_nodes]
    is_small = not any(isinstance(v, torch.Tensor) and v.dim() for v in others)

    def as_number(operand: fx.Node) -> Any:
        number = walk.as_number(operand, node)
        # A number of Python takes the type of what it meets, a tensor without dims need not.
        if (
            number is operand
            or value.dtype is torch.bool
            or not (is_small or number.meta["val"].is_floating_point())
        ):
            return number
        wide = value.dtype if is_small else torch.promote_types(value.dtype, torch.float32)
        return walk.call(_aten.to.dtype, number, wide)

    for argument in schema_of(node).arguments:
        given = named_arguments(node)[argument.name]
        is_number = isinstance(given, fx.Node) and isinstance(given.meta["val"], SYMBOLIC)
        if is_number and not isinstance(argument.type, torch.TensorType):
            raise refused(node, f"is counted for an argument ({argument.name}) that is no tensor")
    node.args = fx.map_arg(node.args, as_number)
    node.kwargs = fx.map_arg(node.kwargs, as_number)
    return node, dims


def _combined(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """A product: what is summed over has to be zero in rows that do not count."""
    letters = combined(node)
    assert letters is not None, "the table has letters"
    known: dict[Any, Rows] = {}
    for value, spelled in letters.operands:
        for letter, rows in zip(spelled, walk.dims_of(value), strict=True):
            if rows is not None and known.setdefault(letter, rows) is not rows:
                raise refused(node, "meets what another mask has as many rows of")
    summed = {letter for letter in known if letter not in letters.result}
    filled: dict[fx.Node, fx.Node] = {}
    for value, spelled in letters.operands:
        dims = walk.dims_of(value)
        along = [dim for dim, letter in enumerate(spelled) if letter in summed]
        filled[value] = walk.filled(value, dims, 0, along)
    node.args = fx.map_arg(node.args, lambda n: filled.get(n, n))
    return node, tuple(known.get(letter) for letter in letters.result)


def _attention(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """Keys that do not count are masked; queries that do not count attend to those that do."""
    query, key, value = arguments_of(node)[:3]
    if walk.dims_of(value)[-2] is not walk.dims_of(key)[-2]:
        raise refused(node, "meets what another mask has as many rows of")
    rows, bias = walk.dims_of(key)[-2], named_arguments(node)["attn_mask"]
    if rows is not None and (bias is None or bias.meta["val"].dtype is torch.bool):
        seen = walk.call(_aten.reshape.default, rows.mask, [1, -1])
        seen = walk.call(_aten.expand.default, seen, [walk.sizes(query)[-2], -1])
        if named_arguments(node)["is_causal"]:
            seen = walk.call(_aten.tril.default, seen)
        if bias is not None:
            seen = walk.call(_aten.logical_and.default, bias, seen)
        node = _changed(node, attn_mask=seen, is_causal=False)
    elif rows is not None:
        dims = (*[None] * (bias.meta["val"].dim() - 1), rows)
        node = _changed(node, attn_mask=walk.filled(bias, dims, -math.inf))
    dims = walk.dims_of(query)
    batch = met(node, (walk.dims_of(v)[:-2] for v in (query, key, value)), len(dims) - 2)
    return node, (*batch, dims[-2], None)


def _kept(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    return node, walk.dims_of(input_of(node))


# --- along dims ---------------------------------------------------------------------------------


def _along_dims(walk: Walk, node: fx.Node) -> tuple[fx.Node, Any]:
    """Of the same shape, or another along the same dims."""
    dims = walk.dims_of(input_of(node))
    along = dims_along(node, len(dims))
    if any(dims[d] for d in along):
        raise refused(node, "is put in order, or taken together")
    return of_each(node, dims)


def _softmax(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    source = input_of(node)
    dims = walk.dims_of(source)
    (dim,) = along = dims_along(node, len(dims))
    rows = dims[dim]
    if rows is None:
        return node, dims
    filled = walk.filled(source, dims, -math.inf, along)
    made = walk.call(target_of(node), filled, *arguments_of(node)[1:])
    return walk.covered(made, rows, dim, len(dims)), dims


def _cumulated(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    source = input_of(node)
    dims = walk.dims_of(source)
    return _changed(node, self=walk.filled(source, dims, 0, dims_along(node, len(dims)))), dims


class _Reduction(NamedTuple):
    """What a reduction takes together: dims of a value.

    Attributes:
        dims: what is known of those of the value, and of the result.
        along: those that are taken together.
        meets_rows: whether one of them has rows that do not count.
    """

    source: fx.Node
    dims: Dims
    along: set[int]
    keepdim: bool
    result: Dims
    meets_rows: bool

    @classmethod
    def of(cls, walk: Walk, node: fx.Node) -> "_Reduction":
        source = input_of(node)
        dims, keepdim = walk.dims_of(source), bool(named_arguments(node).get("keepdim"))
        along = dims_along(node, len(dims))
        kept = tuple(None if d in along else rows for d, rows in enumerate(dims))
        result = kept if keepdim else tuple(r for d, r in enumerate(kept) if d not in along)
        return cls(source, dims, along, keepdim, result, any(dims[d] for d in along))


def _reduced(fill: Any) -> Rule:
    """A reduction to which a number adds nothing."""

    def rule(walk: Walk, node: fx.Node) -> tuple[fx.Node, Any]:
        arguments = named_arguments(node)
        if "other" in arguments:  # of two values, element by element
            return _elementwise(walk, node)
        source, dims, along, _, result, meets_rows = _Reduction.of(walk, node)
        if meets_rows:
            number = fill(source.meta["val"].dtype, arguments)
            if number is None:
                raise refused(node, "is taken together")
            node.args = (walk.filled(source, dims, number, along), *node.args[1:])
        return of_each(node, result)

    return rule


def _limit(sign: int) -> Any:
    return lambda dtype, arguments: limit_of(dtype, sign)


def _of_norm(dtype: torch.dtype, arguments: Mapping[str, Any]) -> Any:
    order = arguments.get("ord", arguments.get("p", 2))
    return 0 if order is None or (isinstance(order, (int, float)) and order > 0) else None


def _number(number: Any) -> Any:
    return lambda dtype, arguments: number


def _elements(walk: Walk, source: fx.Node, along: set[int]) -> Any:
    """How many elements count along some dims: a number, or int64 []."""
    dims, sizes = walk.dims_of(source), walk.sizes(source)
    counted: Any = math.prod(sizes[d] for d in along if dims[d] is None)
    for rows in (rows for d in along if (rows := dims[d]) is not None):
        counted = walk.call(_aten.mul.Tensor, walk.count(rows), counted)
    return counted


def _mean(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    source, _, along, keepdim, result, meets_rows = _Reduction.of(walk, node)
    if not meets_rows:
        return node, result
    dtype = named_arguments(node).get("dtype")
    return _divided_sum(walk, source, along, keepdim, dtype), result


def _divided_sum(
    walk: Walk, source: fx.Node, along: set[int], keepdim: bool, dtype: Any = None
) -> fx.Node:
    filled = walk.filled(source, walk.dims_of(source), 0, along)
    total = walk.call(_aten.sum.dim_IntList, filled, sorted(along), keepdim, dtype=dtype)
    return walk.call(_aten.div.Tensor, total, _elements(walk, source, along))


def _variance(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`var` and `std`."""
    source, dims, along, keepdim, result, meets_rows = _Reduction.of(walk, node)
    if not meets_rows:
        return node, result
    arguments = named_arguments(node)
    correction = arguments.get("correction", int(arguments.get("unbiased", True)))
    correction = 1 if correction is None else correction
    mean = _divided_sum(walk, source, along, keepdim=True)
    apart = walk.filled(walk.call(_aten.sub.Tensor, source, mean), dims, 0, along)
    squares = walk.call(_aten.mul.Tensor, apart, apart)
    total = walk.call(_aten.sum.dim_IntList, squares, sorted(along), keepdim)
    count = walk.call(_aten.sub.Tensor, _elements(walk, source, along), correction)
    found = walk.call(_aten.div.Tensor, total, walk.call(_aten.clamp_min.default, count, 0))
    is_root = target_of(node)._schema.name == "aten::std"
    return walk.call(_aten.sqrt.default, found) if is_root else found, result


# --- layers and losses --------------------------------------------------------------------------


def _by_batch(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """Layers that treat what is along the first dim one by one."""
    dims = walk.dims_of(input_of(node))
    others = [n for n in node.all_input_nodes if n is not input_of(node)]
    if any(dims[1:]) or any(any(walk.dims_of(other)) for other in others):
        raise refused(node, "is taken together")
    return node, (dims[0], *[None] * (node.meta["val"].dim() - 1))


def _batch_norm(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    if named_arguments(node)["training"]:
        raise refused(node, "is normed together")
    return _by_batch(walk, node)


def _recurrent(walk: Walk, node: fx.Node) -> tuple[fx.Node, list[Dims]]:
    """A sequence takes no step in the rows of time that do not count."""
    source, mask, states = arguments_of(node)[:3]
    steps, sequences, others = walk.dims_of(source)
    known = [(None, *walk.dims_of(state)) for state in states]
    (_, sequences, width) = met(node, [(None, sequences, None), *known], 3)
    if mask is not None:
        steps, sequences = met(node, [(steps, sequences), walk.dims_of(mask)], 2)
    if others is not None or width is not None:
        raise refused(node, "is taken together")
    if steps is not None:
        size = node.meta["val"][0].shape[1] if sequences is None else sequences.size
        own = walk.call(_aten.reshape.default, steps.mask, [-1, 1])
        own = walk.call(_aten.expand.default, own, [-1, size])
        if mask is not None:
            own = walk.call(_aten.logical_and.default, own, mask)
        node = _changed(node, mask=own)
    return node, [(steps, sequences, None), *[(sequences, None)] * len(states)]


def _embedded(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    table, indices = arguments_of(node)[:2]
    if any(walk.dims_of(table)):
        raise refused(node, "is a table")
    return node, (*walk.dims_of(indices), None)


def _classified(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """Losses of classes: rows that do not count have a class that is ignored."""
    arguments = named_arguments(node)
    scores, target = arguments_of(node)[:2]
    dims = walk.dims_of(target)
    if target.meta["val"].is_floating_point() or not any(dims):
        raise refused(node, "has a loss of probabilities, or is no dim of its labels")
    known, ignored = walk.dims_of(scores), arguments["ignore_index"]
    classes = known[1] if len(known) > len(dims) else None
    met(node, [known, (dims[0], classes, *dims[1:])], len(dims) + 1)
    if classes is not None:  # labels are numbers of rows
        if arguments.get("label_smoothing") or arguments["weight"] is not None:
            raise refused(node, "is a dim of classes, of which each label needs all or weights")
        scores = walk.filled(scores, known, -math.inf, (1,))
        is_ignored = walk.call(_aten.eq.Scalar, target, ignored)
        places = numbered(walk, classes, target)
        target = walk.call(_aten.where.ScalarSelf, is_ignored, ignored, places)
    filled = walk.filled(target, dims, ignored)
    loss = _changed(node, self=scores, target=filled)
    if arguments["reduction"] == 0:
        return loss, dims
    asked = [rows for rows in dims if rows is not None and rows.is_asked]
    if arguments["reduction"] == 1 and asked:
        loss = walk.call(target_of(node), *loss.args, **loss.kwargs)
        loss = walk.settled(loss, asked[0])
    return loss, ()


def _of_steps(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`ctc_loss`: of steps [T, B, C] it reads the first ones, and those that count come first."""
    scores = input_of(node)
    rows, *others = walk.dims_of(scores)
    if rows is None or any(others) or any(any(walk.dims_of(n)) for n in node.all_input_nodes[1:]):
        raise refused(node, "is taken together")
    ordered = walk.call(_aten.index_select.default, scores, 0, walk.in_order(rows))
    return _changed(node, log_probs=ordered), (None,) * node.meta["val"].dim()


def _lost(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """Losses element by element, and their sum or mean."""
    reduction = named_arguments(node)["reduction"]
    values = [n for n in node.all_input_nodes if n.meta["val"].dim()]
    num_dims = max(n.meta["val"].dim() for n in values)
    dims = aligned(walk, node, values, num_dims)
    longest = next(n for n in values if n.meta["val"].dim() == num_dims)
    if reduction == 0:
        return node, dims
    every = _changed(node, reduction=0)
    every = walk.call(target_of(node), *every.args, **every.kwargs)
    every.meta["val"] = longest.meta["val"]
    walk.set_dims(every, dims)
    if reduction == 1:
        return _divided_sum(walk, every, set(range(num_dims)), keepdim=False), ()
    return walk.call(_aten.sum.default, walk.filled(every, dims, 0)), ()


def _similar(walk: Walk, node: fx.Node) -> tuple[fx.Node, Dims]:
    """`cosine_similarity`: along a dim, which is counted in what both become together;
    `pairwise_distance`: along the last one.
    """
    values, named = arguments_of(node)[:2], named_arguments(node)
    is_kept = named.get("keepdim", False)
    num_dims = node.meta["val"].dim() + (not is_kept)
    dims = aligned(walk, node, values, num_dims)
    dim = named.get("dim", -1) % num_dims
    if dims[dim] is not None:
        raise refused(node, "is taken together")
    return node, (*dims[:dim], *[None] * is_kept, *dims[dim + 1 :])


_LIKE = [f"aten::{name}_like" for name in ("zeros", "ones", "full", "rand", "randn", "empty")]
_LAYERS = (
    *(_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default, _aten.convolution.default),
    *(_aten.conv1d.padding, _aten.conv2d.padding, _aten.group_norm.default),
    *(_aten.instance_norm.default, _aten.max_pool2d.default, _aten.avg_pool2d.default),
    *(_aten.adaptive_avg_pool2d.default, _aten.avg_pool1d.default, _aten.max_pool1d.default),
)
_LOSSES = ("mse", "l1", "smooth_l1", "huber", "soft_margin")
_REDUCTIONS: Mapping[str, Any] = {
    **dict.fromkeys(("sum", "any", "count_nonzero"), _number(0)),
    **dict.fromkeys(("prod", "all"), _number(1)),
    "amax": _limit(-1),
    "amin": _limit(1),
    **dict.fromkeys(("norm", "linalg_vector_norm"), _of_norm),
    **dict.fromkeys(("median", "var_mean", "std_mean"), _number(None)),
    "logsumexp": _number(-math.inf),
}

_EXTREMES: Mapping[str, Any] = {
    "max": _limit(-1),
    "min": _limit(1),
    **dict.fromkeys(("argmax", "argmin"), _number(None)),
}

_RULES: Mapping[Any, Rule] = {
    **RULES_OF_PLACES,
    **RULES_OF_SHAPES,
    **RULES_OF_ORDER,
    **dict.fromkeys((*PRODUCTS, _aten.einsum.default), _combined),
    **dict.fromkeys(_LAYERS, _by_batch),
    **{f"aten::{name}": _reduced(fill) for name, fill in _REDUCTIONS.items()},
    **{f"aten::{name}": extreme_or(_reduced(fill)) for name, fill in _EXTREMES.items()},
    **{f"aten::{name}_loss": _lost for name in _LOSSES},
    **dict.fromkeys(("aten::binary_cross_entropy", "aten::kl_div"), _lost),
    "aten::binary_cross_entropy_with_logits": _lost,
    **dict.fromkeys(("aten::cross_entropy_loss", "aten::nll_loss_nd"), _classified),
    "aten::nll_loss": _classified,
    "aten::ctc_loss": _of_steps,
    "aten::mean": _mean,
    **dict.fromkeys(("aten::var", "aten::std"), _variance),
    **dict.fromkeys((_aten.softmax.int, _aten.log_softmax.int), _softmax),
    **dict.fromkeys((_aten._softmax.default, _aten._log_softmax.default), _softmax),
    **dict.fromkeys((_aten.layer_norm.default, _aten.rms_norm.default), _along_dims),
    **dict.fromkeys((_aten.glu.default, _aten.roll.default), _along_dims),
    _aten.copy.default: _elementwise,
    _aten.cumprod.default: _along_dims,
    _aten.cumsum.default: _cumulated,
    _aten.batch_norm.default: _batch_norm,
    _aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys((_aten.cosine_similarity.default, _aten.pairwise_distance.default), _similar),
    **dict.fromkeys((*_LIKE, "aten::fill", "aten::bernoulli", _aten.dropout.default), _kept),
    LAYER: _recurrent,
    _aten.embedding.default: _embedded,
    _aten.one_hot.default: lambda walk, node: (node, (*walk.dims_of(input_of(node)), None)),
}


def rule_of(node: fx.Node) -> Rule | None:
    """How an operator treats rows; None for one that is not known."""
    target = target_of(node)
    name = getattr(getattr(target, "_schema", None), "name", "")
    found = _RULES.get(target) or _RULES.get(name)
    return _elementwise if found is None and is_elementwise(node) else found
