"""torch's operator samples as flat graphs, with their derivatives, for the table of operators."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from mpxla.device.pjrt.graphs import decompositions, unknown_nodes
from mpxla.tests.sweep.samples import Case

__all__ = ["Traced", "operators_of", "trace"]


@dataclass(frozen=True)
class Traced:
    """A call of an operator as a graph, and what PyTorch gives for it.

    Attributes:
        title: operator and number of its sample.
        module: flat graph; every node knows its value.
        arguments: host tensors.
        expected: results, then gradients.
        process: picks what is unique of a result.
    """

    title: str
    module: fx.GraphModule
    arguments: list[torch.Tensor]
    expected: list[torch.Tensor]


def operators_of(module: fx.GraphModule) -> set[OpOverload]:
    """The operators that a graph calls."""
    return {n.target for n in module.graph.nodes if isinstance(n.target, OpOverload)}


def trace(case: Case, with_gradients: bool = True) -> Traced | None:
    """A sample as a graph; None where shapes depend on values, or the table lacks an operator."""
    leaves, structure = pytree.tree_flatten(case.arguments)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i].detach().clone() for i in places]
    trained = [with_gradients and leaves[i].requires_grad for i in places]

    def call(*arguments: torch.Tensor) -> list[torch.Tensor]:
        filled = list(leaves)
        with torch.enable_grad():
            own = [a.detach().clone().requires_grad_(t) for a, t in zip(arguments, trained)]
            for place, tensor in zip(places, own, strict=True):
                filled[place] = tensor
            first, args, kwargs = pytree.tree_unflatten(filled, structure)
            found = case.process(case.function(first, *args, **kwargs))
            results = [r for r in pytree.tree_leaves(found) if isinstance(r, torch.Tensor)]
            return [r.detach() for r in [*results, *_gradients(results, own)]]

    try:
        expected = call(*tensors)
        module = _functional(call, tensors)
    except Exception:  # PyTorch raises anything where a trace would need values
        return None
    if unknown_nodes(module.graph):
        return None
    return Traced(f"{case.operator} {case.number}", module, tensors, expected)


def _gradients(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    ends = [r for r in results if r.requires_grad and r.is_floating_point()]
    wanted = [i for i in inputs if i.requires_grad]
    if not ends or not wanted:
        return []
    weights = [torch.cos(end.detach()) for end in ends]
    found = torch.autograd.grad(ends, wanted, weights, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def _functional(
    function: Callable[..., list[torch.Tensor]], arguments: list[torch.Tensor]
) -> fx.GraphModule:
    table: Any = dict(decompositions())
    with torch.no_grad():
        module = make_fx(function, decomposition_table=table, tracing_mode="fake")(*arguments)
        if any(operator._schema.is_mutable for operator in operators_of(module)):
            functional = torch.func.functionalize(function, remove="mutations_and_views")
            module = make_fx(functional, table, tracing_mode="fake")(*arguments)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module
