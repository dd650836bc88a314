"""Users' `torch.autograd.Function`s as operators of a captured step.

Every captured function is an operator of its own, `mpxla_functions::NAME_HASH`, so that export, the
partitioner and costs see one node, which no cut divides. The operator has no derivative: where a
stage is lowered, `applied` runs the traced forward in its place, with the traced backward as its
derivative. Equal functions share an operator, named by its contents, so that ranks agree.

This module must not know how functions are traced.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module  # pyright: ignore[reportPrivateUsage]

from mpxla.graph.typed import Function, arguments_of

__all__ = [
    "PartialFunction",
    "TracedFunction",
    "applied",
    "hands_back",
    "operator_of",
    "traced_function",
]


@dataclass(frozen=True)
class TracedFunction:
    """A function with its derivative.

    Attributes:
        name: the class's, for messages.
        forward: graph, inputs -> (results, values for the backward).
        backward: graph, (values for the backward, gradients) -> gradients of inputs.
        results: shape and dtype of every result.
        has_gradient: for every result whether a gradient comes back for it; those that have none
            are no arguments of `backward`.
        is_differentiated: for every input whether `backward` gives its gradient.
        is_random: whether it draws random numbers.
        partial: what it is where only some of its results have a gradient, if that is another;
            None if it may be, and there are too many results to know.
    """

    name: str
    forward: fx.Graph
    backward: fx.Graph
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    has_gradient: tuple[bool, ...]
    is_differentiated: tuple[bool, ...]
    is_random: bool
    partial: "tuple[PartialFunction, ...] | None" = ()

    def key(self) -> str:
        """Equal for functions that compute the same."""
        values = [node.meta["val"] for node in self.forward.find_nodes(op="placeholder")]
        inputs = [(tuple(value.shape), value.dtype) for value in values]
        flags = (self.has_gradient, self.is_differentiated)
        partial = [(part.used, part.function.key(), part.inputs) for part in self.partial or ()]
        known = self.partial is not None, partial
        parts = (self.forward, self.backward, inputs, self.results, flags, known)
        digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
        return f"{self.name}_{digest[:16]}"


@dataclass(frozen=True)
class PartialFunction:
    """A function some of whose results have no gradient.

    Attributes:
        used: for every result whether it has one.
        function: with as many results.
        inputs: which of the inputs it takes.
    """

    used: tuple[bool, ...]
    function: TracedFunction
    inputs: tuple[int, ...]


_library = torch.library.Library("mpxla_functions", "DEF")
_functions: dict[Any, TracedFunction] = {}
"""By operator; operators live as long as the process, as all of torch's do."""


def traced_function(target: Any) -> TracedFunction | None:
    """The function whose operator a node calls; None for other operators."""
    return _functions.get(target)


def hands_back(node: fx.Node, tensor: fx.Node) -> bool:
    """Whether a node that gets a gradient gives some of it to a tensor that it reads."""
    function = traced_function(node.target)
    if function is None:
        return True
    pairs = zip(arguments_of(node)[0], function.is_differentiated, strict=True)
    return any(wanted for given, wanted in pairs if given is tensor)


def operator_of(function: TracedFunction) -> Callable[[Sequence[torch.Tensor]], Any]:
    """The operator, `(Tensor[] inputs) -> Tensor[]`, that stands for a function in a graph."""
    key = function.key()
    known = getattr(torch.ops.mpxla_functions, key, None)
    if known is not None:
        return known.default
    forward = _make_graph_module(torch.nn.Module(), function.forward)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [value.clone() for value in forward(*inputs)[: len(function.results)]]

    def shapes(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in function.results]

    tags = (torch.Tag.nondeterministic_seeded,) if function.is_random else ()
    _library.define(f"{key}(Tensor[] inputs) -> Tensor[]", tags=tags)
    operator = getattr(torch.ops.mpxla_functions, key).default
    _library.impl(key, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mpxla_functions::{key}", shapes, lib=_library)
    _set_gradient_flags(function, f"mpxla_functions::{key}")
    _functions[operator] = function
    return operator


def _set_gradient_flags(function: TracedFunction, operator: str) -> None:
    """Says which results have gradients; while a step is captured none are computed."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        ctx.inputs = inputs[0]
        flags = zip(output, function.has_gradient, strict=True)
        ctx.mark_non_differentiable(*(r for r, has_gradient in flags if not has_gradient))

    def zeros(ctx: Any, _: Any) -> list[torch.Tensor | None]:
        # For `torch.autograd.grad` in a step, which asks what depends on what.
        pairs = zip(ctx.inputs, function.is_differentiated, strict=True)
        return [torch.zeros_like(x) if wanted else None for x, wanted in pairs]

    torch.library.register_autograd(operator, zeros, setup_context=setup, lib=_library)


def applied(
    target: Any, prepared: Callable[[fx.Graph], fx.Graph]
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None:
    """What runs in the place of a function's operator; None for other operators.

    `prepared` makes the function's graphs fit for the device.
    """
    function = traced_function(target)
    if function is None:
        return None
    # Without `fx.Interpreter`: what is traced belongs to the node of the operator.
    forward = _make_graph_module(torch.nn.Module(), prepared(function.forward))
    backward = _make_graph_module(torch.nn.Module(), prepared(function.backward))
    count = len(function.results)

    class Applied(Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values = forward(*inputs)
            ctx.save_for_backward(*values[count:])
            # An input that is returned as it is would be taken for a view of itself.
            results = tuple(value.clone() for value in values[:count])
            flags = zip(results, function.has_gradient, strict=True)
            ctx.mark_non_differentiable(*(r for r, has_gradient in flags if not has_gradient))
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            flags = zip(gradients, function.has_gradient, strict=True)
            # The backward was traced with gradients that lie in memory without gaps.
            given = [gradient.contiguous() for gradient, has_gradient in flags if has_gradient]
            found = iter(backward(*ctx.saved_tensors, *given))
            return tuple(next(found) if wanted else None for wanted in function.is_differentiated)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(Applied.apply(*inputs))

    return run
