"""Simplifications of traced graphs before they are cut into forward and backward.

Graphs here are functional and their results are separate buffers, so copies and detaches mean
nothing; each pass changes a graph in place and keeps its values bit for bit.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx._lazy_graph_module import _make_graph_module

__all__ = ["is_view", "replace_call", "simplify"]

_aten = torch.ops.aten
_NOTHING = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default)
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
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        is_copy = node.target is _aten.clone.default
        is_double = node.target is _aten.t.default and source.target is _aten.t.default
        if node.target in _NOTHING or is_copy:
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
        elif is_double:
            node.replace_all_uses_with(cast(fx.Node, source.args[0]))
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    result = _make_graph_module(module, fx_graph_cse(module.graph))
    result.graph.lint()
    return result


def replace_call(node: fx.Node, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Puts a call with the same value and metadata in the place of a node."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, arguments)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
