"""Parts of torch under the types that they have in this package.

To torch, an argument of a node may be almost anything, and what a node calls any function or name.
In a graph of ATen operators the schema of the operator says more than that, which no type can.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import fx

__all__ = [
    "SYMBOLIC",
    "Function",
    "arguments_of",
    "computed_results",
    "input_of",
    "named_arguments",
    "origin_of",
    "outputs_of",
    "result_of",
    "schema_of",
    "symbolic_numbers",
    "target_of",
]

Function: Any = torch.autograd.Function
"""By torch's type `backward` takes any number of gradients, and `apply` may give None."""


def arguments_of(node: fx.Node) -> tuple[Any, ...]:
    """Positional arguments of a node."""
    return node.args


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments, in the order of the schema, with its defaults for those that are not given."""
    schema = schema_of(node).arguments
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def input_of(node: fx.Node) -> fx.Node:
    """The first argument of a node, which is a node for most operators."""
    return cast(fx.Node, node.args[0])


def origin_of(node: fx.Node, *more: str) -> dict[str, Any]:
    """What tells of the module and the line that a node comes from, and more of its metadata."""
    return {k: node.meta[k] for k in ("nn_module_stack", "stack_trace", *more) if k in node.meta}


def outputs_of(graph: fx.Graph) -> list[Any]:
    """What a graph returns: nodes, and None in graphs that may give nothing in a place."""
    return list(arguments_of(graph.output_node())[0])


def computed_results(graph: fx.Graph) -> tuple[list[fx.Node], list[int | tuple[int]]]:
    """What a program of a graph computes; arguments that it hands on as they came are not part.

    Returns:
        The nodes to compute, and for every result of the graph the number of one of them, or that
        of an argument as (i,).
    """
    place = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    number: dict[fx.Node, int] = {}
    results: list[int | tuple[int]] = []
    for node in outputs_of(graph):
        if node in place:
            results.append((place[node],))
        else:
            results.append(number.setdefault(node, len(number)))
    return list(number), results


def schema_of(node: fx.Node) -> torch.FunctionSchema:
    """The schema of the operator that a node calls."""
    return target_of(node)._schema


SYMBOLIC = torch.SymInt, torch.SymFloat, torch.SymBool
"""Types of numbers that depend on values while a step is captured."""


def symbolic_numbers(node: fx.Node) -> list[Any]:
    """What depends on values among the sizes of a node's values, or a number that it gives."""
    return [
        size
        for value in pytree.tree_leaves(node.meta.get("val"))
        for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
        if isinstance(size, SYMBOLIC)
    ]


def target_of(node: fx.Node) -> Any:
    """The operator or function that a node calls."""
    return node.target


def result_of(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What a node gives for values of its inputs."""
    args, kwargs = cast(Any, fx.map_arg((node.args, node.kwargs), lambda n: values[n]))
    return target_of(node)(*args, **kwargs)
