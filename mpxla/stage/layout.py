"""Layouts in which XLA's CPU backend multiplies fastest, for steps that are optimized for speed.

A linear layer is three products. By microbatch, on one core, with W [out, in], x and dy of 256 rows
(384 x 1536, ms): x @ W.T takes 3.1 and x @ (W.T, laid out anew) 2.7; dy.T @ x takes 3.8 and
x.T @ dy 3.0. With 1536 inputs and 384 outputs it is 4.0 and 2.7, and 3.0 and 3.8. So

    weights     are transposed once per step; all microbatches read the copy. That costs memory:
                a second copy of every weight of a linear layer.
    gradients   with more rows than columns are accumulated transposed, and turned round when the
                last microbatch has been added.

Both passes change graphs in place and keep what they compute. They must not know about ranks.
"""

from collections.abc import Sequence

import torch
from torch import fx

from mpxla.graph.typed import input_of, outputs_of, target_of
from mpxla.stage.saved_values import set_outputs
from mpxla.stage.spec import TensorSpec

__all__ = ["transpose", "transpose_gradients", "transpose_weights", "transposed"]

_aten = torch.ops.aten
_RIGHT_FACTOR = {_aten.mm.default: 1, _aten.addmm.default: 2}


def transpose(*matrices: torch.Tensor) -> list[torch.Tensor]:
    """Matrices [M, N] to their transposes [N, M], as new buffers."""
    return [matrix.t().clone(memory_format=torch.contiguous_format) for matrix in matrices]


def transposed(spec: TensorSpec) -> TensorSpec:
    """The spec of the transpose of a matrix."""
    return TensorSpec(spec.shape[::-1], spec.dtype)


def transpose_weights(forward: fx.GraphModule, weights: Sequence[int]) -> tuple[int, ...]:
    """Gives a forward graph the transposes of weights as arguments of their own.

    Args:
        forward: the graph.
        weights: those of its arguments that are the same for all microbatches.

    Returns:
        Which weights; their transposes follow the other arguments, in this order.
    """
    placeholders = [n for n in forward.graph.nodes if n.op == "placeholder"]
    found: list[int] = []
    last = placeholders[-1] if placeholders else None
    for index in weights:
        holder = placeholders[index]
        products = [
            (view, user)
            for view in holder.users
            if view.target is _aten.t.default
            for user in view.users
            if user.target in _RIGHT_FACTOR and user.args[_RIGHT_FACTOR[target_of(user)]] is view
        ]
        if not products:
            continue
        found.append(index)
        with forward.graph.inserting_after(last):
            last = forward.graph.placeholder(f"{holder.name}_transposed")
        last.meta = dict(products[0][0].meta)
        for view, product in products:
            position = _RIGHT_FACTOR[target_of(product)]
            arguments = list(product.args)
            arguments[position] = last
            product.args = tuple(arguments)
            if not view.users:
                forward.graph.erase_node(view)
    forward.graph.lint()
    forward.recompile()
    return tuple(found)


def transpose_gradients(backward: fx.GraphModule, results: Sequence[int]) -> tuple[int, ...]:
    """Makes a derivative give tall gradients of weights, which are some of its results, transposed.

    Returns:
        Positions in `results` of those that are transposed now.
    """
    values = outputs_of(backward.graph)
    found: list[int] = []
    for position, index in enumerate(results):
        node = values[index]
        if node is None or not _is_tall_product(node):
            continue
        left, right = node.args[0].args[0], node.args[1]
        with backward.graph.inserting_before(node):
            turned = backward.graph.call_function(_aten.t.default, (right,))
            product = backward.graph.call_function(_aten.mm.default, (turned, left))
        turned.meta, product.meta = _meta(right), _meta(node)
        values[index] = product
        found.append(position)
    set_outputs(backward, values)
    backward.graph.lint()
    return tuple(found)


def _is_tall_product(node: fx.Node) -> bool:
    """Whether it is `A.T @ B` with more rows than columns, of which nothing else is made."""
    return (
        node.target is _aten.mm.default
        and input_of(node).target is _aten.t.default
        and len(node.users) == 1
        and node.meta["val"].shape[0] > node.meta["val"].shape[1]
    )


def _meta(source: fx.Node) -> dict[str, object]:
    return {**source.meta, "val": source.meta["val"].t()}
