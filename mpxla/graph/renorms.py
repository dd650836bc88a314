"""`nn.Embedding(max_norm=...)` in a step: rows that are too long are scaled where they are read.

PyTorch writes the scaled rows into the parameter, which programs only read. So the graph computes
with scaled rows, and what rows are scaled by is a result of the step, for the runtime to write.
All microbatches scale a row by the same number. This module must not know when that is written.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mpxla.graph.typed import input_of, origin_of, outputs_of

__all__ = ["replace_renorms"]

_aten = torch.ops.aten
_EPSILON = 1e-7
"""That of `embedding_renorm_` (torch 2.9)."""


def replace_renorms(graph: fx.Graph) -> Mapping[int, fx.Node]:
    """Puts values in the place of writes to tables, in place.

    Returns:
        Output of the graph that is the new value of a table -> what its rows are scaled by,
        [rows, 1], which is that output then.
    """
    scales: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=_aten.embedding_renorm.default):
        table, scale = _replaced(graph, node, scales)
        node.replace_all_uses_with(table)
        graph.erase_node(node)
        scales[table] = scale
    outputs = outputs_of(graph)
    found = {i: scales[node] for i, node in enumerate(outputs) if node in scales}
    graph.output_node().args = (tuple(found.get(i, node) for i, node in enumerate(outputs)),)
    return found


def _replaced(
    graph: fx.Graph, node: fx.Node, scales: Mapping[fx.Node, fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """Nodes that compute the table after an `embedding_renorm`, and what its rows have been scaled
    by in the step so far.
    """
    given, indices, max_norm, order = node.args
    source = input_of(node)
    while source.target is _aten.detach.default:
        source = input_of(source)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta = origin_of(node)
        return made

    with graph.inserting_before(node):
        norms = call(_aten.linalg_vector_norm.default, given, order, [1], True)
        ones = call(_aten.ones_like.default, norms)
        flat = call(_aten.reshape.default, call(_aten.to.dtype, indices, torch.int64), [-1])
        limit = call(
            _aten.index_fill.int_Scalar,
            call(_aten.full_like.default, norms, math.inf),
            *(0, flat, max_norm),
        )
        ratio = call(_aten.reciprocal.default, call(_aten.add.Scalar, norms, _EPSILON))
        scale = call(
            _aten.where.self,
            call(_aten.gt.Tensor, norms, limit),
            call(_aten.mul.Scalar, ratio, max_norm),
            ones,
        )
        # PyTorch differentiates by the table as it is after the write: the difference is zero, and
        # has the gradient.
        table = call(
            _aten.add.Tensor,
            call(_aten.detach.default, call(_aten.mul.Tensor, given, scale)),
            call(_aten.sub.Tensor, source, call(_aten.detach.default, source)),
        )
        if source in scales:
            scale = call(_aten.mul.Tensor, scale, scales[source])
        return table, call(_aten.detach.default, scale)
