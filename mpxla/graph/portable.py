"""Graphs whose nodes say what they know in plain data, for files."""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx._lazy_graph_module import _make_graph_module  # pyright: ignore[reportPrivateUsage]

__all__ = ["dumped", "portable", "revived"]

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


def portable(
    module: fx.GraphModule, spec_of: Callable[[torch.Tensor], Any], metas: Collection[str] = ()
) -> fx.GraphModule:
    """A copy whose nodes know their values' specs and where they come from.

    Args:
        module: keeps what its nodes know.
        spec_of: of a stand-in for a value, which would take longest to restore.
        metas: what else nodes keep of their metadata.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copies[module.graph.output_node()] = graph.output(graph.graph_copy(module.graph, copies))
    for node, twin in copies.items():
        twin.meta = {k: node.meta[k] for k in ("val", "stack_trace", *metas) if k in node.meta}
        if "val" in twin.meta:
            twin.meta["val"] = pytree.tree_map_only(torch.Tensor, spec_of, twin.meta["val"])
        for name in _STACKS:
            if node.meta.get(name):  # with classes, which need not be there again
                twin.meta[name] = {k: (path, "") for k, (path, _) in node.meta[name].items()}
    return _make_graph_module(module, graph)


def revived(
    module: fx.GraphModule, kind: type, stand_in: Callable[[Any], torch.Tensor]
) -> fx.GraphModule:
    """What `portable` has made, with stand-ins for values; it can be called.

    Args:
        module: its nodes are changed in place.
        kind: of the specs.
        stand_in: makes a tensor of a spec.
    """
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(kind, stand_in, node.meta["val"])
    return _make_graph_module(module, module.graph)


def dumped(value: Any) -> bytes:
    """A value with plain graphs in it, for `GraphPickler.loads`."""
    options: Any = Options(ops_filter=None)
    if hasattr(options, "node_metadata_key_filter"):  # torch 2.13 leaves modules of nodes out
        options.node_metadata_key_filter = None
    return GraphPickler.dumps(value, options)
