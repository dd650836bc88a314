"""Simplifications of traced graphs before they are cut into forward and backward.

Graphs here are functional and their results are separate buffers, so copies and detaches mean
nothing; each pass changes a graph in place and keeps its values bit for bit.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module  # pyright: ignore[reportPrivateUsage]

from mpxla.graph.stepgraph import is_random
from mpxla.graph.typed import input_of

__all__ = ["is_view", "replace_call", "simplify"]

_aten = torch.ops.aten
_NOTHING = (
    _aten.alias.default,
    _aten.alias_copy.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.detach_copy.default,
    _aten.lift_fresh_copy.default,
)
_UNDEFINED = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default)
_VIEWS = frozenset(
    {
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten.select.int,
    }
)


def is_view(node: fx.Node) -> bool:
    """Whether the node only rearranges its one tensor argument, at no cost."""
    return node.op == "call_function" and node.target in _VIEWS


def simplify(module: fx.GraphModule) -> fx.GraphModule:
    """Removes copies, detaches, double transposes and repeated subexpressions."""
    for node in list(module.graph.nodes):
        if node.target is _aten.t.default and input_of(node).target is _aten.t.default:
            node.replace_all_uses_with(input_of(input_of(node)))
            module.graph.erase_node(node)
        elif node.target in _NOTHING:
            node.replace_all_uses_with(input_of(node))
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    _merge_equal(module.graph)
    result = _make_graph_module(module, module.graph)
    result.graph.lint()
    return result


def _merge_equal(graph: fx.Graph) -> None:
    """Leaves one of several nodes that compute the same.

    torch's own `fx_graph_cse` (2.9) knows some random operators by name and merges all others, so
    that two draws of `exponential`, for instance, would be one.
    """
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_random(node) or node.target in _UNDEFINED:
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _frozen(value: Any) -> Any:
    """An argument as something to compare: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(part) for part in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(part)) for key, part in sorted(value.items()))
    return value if isinstance(value, fx.Node) else (type(value), repr(value))


def replace_call(
    node: fx.Node,
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any] | None = None,
) -> None:
    """Puts a call with the same value and metadata in the place of a node."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, arguments, keywords)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
