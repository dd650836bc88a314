"""A stage's derivative as it runs for a microbatch: seeded, and added to what came before."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module  # pyright: ignore[reportPrivateUsage]

from mpxla.stage.spec import TensorSpec

__all__ = ["AccumulatingBackward", "accumulator_spec"]

_aten = torch.ops.aten
_NARROW = (torch.bfloat16, torch.float16)


def accumulator_spec(parameter: TensorSpec) -> TensorSpec:
    """What the gradients of a parameter are summed in: float32 for 16-bit types, else its own.

    A sum of n microbatches in bfloat16 loses log2(n) of its 8 bits, and stands still once a term is
    below half an ulp of the sum.
    """
    is_narrow = parameter.dtype in _NARROW
    return replace(parameter, dtype=torch.float32) if is_narrow else parameter


@dataclass(frozen=True)
class AccumulatingBackward:
    """(accumulators, saved, gradients, seed) -> (accumulators, gradients of inputs).

    Attributes:
        derivative: (saved, gradient of every attached output) -> gradients of the arguments.
        num_accumulators: how many parameters are trained.
        num_saved: how many values are saved.
        port_of_grad: for every gradient that arrives, the output that it belongs to.
        objective_specs: specs of the objectives, whose gradient is the seed.
        input_specs: specs of the inputs that get a gradient.
        gradients: which results of the derivative are wanted: those of parameters, then of inputs.
        disguises_sums: see `_added`.
    """

    derivative: fx.GraphModule
    num_accumulators: int
    num_saved: int
    port_of_grad: tuple[int, ...]
    objective_specs: tuple[TensorSpec, ...]
    input_specs: tuple[TensorSpec, ...]
    gradients: tuple[int, ...]
    disguises_sums: bool = False

    def flat(self, inputs: Sequence[TensorSpec], device: torch.device) -> fx.GraphModule:
        """All of it as one graph.

        The derivative is copied node by node: strides in it mean nothing any more, and tracing it
        again would look at them. Nodes beside its own do not know their values yet. Gradients that
        the derivative does not have are zeros on the device.
        """
        graph = fx.Graph()
        arguments = [graph.placeholder(f"argument_{i}") for i in range(len(inputs))]
        first_grad = self.num_accumulators + self.num_saved
        saved, seed = arguments[self.num_accumulators : first_grad], arguments[-1]
        by_port: dict[int, fx.Node] = {}  # an output that several stages read gets the sum
        for port, grad in zip(self.port_of_grad, arguments[first_grad:-1], strict=True):
            known = by_port.get(port)
            by_port[port] = grad if known is None else _call(graph, _aten.add.Tensor, known, grad)
        tangents = list(by_port.values())
        for spec in self.objective_specs:
            value = _cast(graph, seed, spec.dtype)
            tangents.append(_call(graph, _aten.expand.default, value, list(spec.shape)))
        holders = [node for node in self.derivative.graph.nodes if node.op == "placeholder"]
        copies = dict(zip(holders, [*saved, *tangents], strict=True))
        results = cast(list[fx.Node | None], graph.graph_copy(self.derivative.graph, copies))
        grads = [results[i] for i in self.gradients]
        found = self._added(graph, arguments, inputs, grads)
        for grad, spec in zip(grads[len(found) :], self.input_specs, strict=True):
            if grad is None:
                options: dict[str, Any] = {"dtype": spec.dtype, "device": device}
                shape = list(spec.shape)
                grad = graph.call_function(_aten.full.default, (shape, 0), options)
            found.append(grad)
        graph.output(tuple(found))
        graph.eliminate_dead_code()
        graph.lint()
        return _make_graph_module(self.derivative, graph)

    def _added(
        self,
        graph: fx.Graph,
        arguments: Sequence[fx.Node],
        inputs: Sequence[TensorSpec],
        grads: Sequence[fx.Node | None],
    ) -> list[fx.Node]:
        """The accumulators with the first gradients added, in their dtypes; None adds nothing.

        XLA's CPU backend compiles every lone addition by itself, but fused operations of one kind
        and shape only once. So there (`Lowering.disguises_sums`) a gradient is multiplied by a one
        that XLA does not know to be one: 34 additions of a GPT with 8 blocks took 1.3 s to compile,
        and take 0.2 s.
        """
        ones: dict[torch.dtype, fx.Node] = {}
        one: fx.Node | None = None
        if self.disguises_sums:
            # Not `seed - seed + 1`: an infinite seed (a loss scale that overflows) would make NaN.
            is_one = _call(
                graph, _aten.eq.Scalar, _call(graph, _aten.mul.Tensor, arguments[-1], 0), 1
            )
            one = _call(graph, _aten.add.Tensor, _cast(graph, is_one, inputs[-1].dtype), 1)
        found: list[fx.Node] = []
        for number in range(self.num_accumulators):
            sum_so_far, dtype, grad = arguments[number], inputs[number].dtype, grads[number]
            if grad is None:
                found.append(sum_so_far)
                continue
            grad = _cast(graph, grad, dtype)
            if one is not None:
                if dtype not in ones:
                    ones[dtype] = _cast(graph, one, dtype)
                grad = _call(graph, _aten.mul.Tensor, grad, ones[dtype])
            found.append(_call(graph, _aten.add.Tensor, sum_so_far, grad))
        return found


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    return graph.call_function(target, args)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if "val" in node.meta and node.meta["val"].dtype == dtype:
        return node
    return graph.call_function(_aten._to_copy.default, (node,), {"dtype": dtype})
