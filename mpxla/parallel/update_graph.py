"""The graph of an optimizer's update, in which equal parameters are traced once.

A model has few kinds of parameters: of each kind one is traced, and its part of the graph is copied
for the others. That is right only where a parameter's update depends on nothing but itself, which
is known of torch's own optimizers; others are traced as a whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mpxla.device.backend import Lowering
from mpxla.parallel.elementwise import ELEMENTWISE
from mpxla.parallel.stochastic_rounding import Origin
from mpxla.parallel.update_slots import Arrangement
from mpxla.parallel.update_trace import UpdateFunction, python_state
from mpxla.stage.program import trace_program
from mpxla.stage.spec import TensorSpec

__all__ = ["update_graph"]

_NAME = "optimizer update"


def update_graph(
    arrangement: Arrangement,
    optimizer: Any,
    inputs: Sequence[TensorSpec],
    lowering: Lowering,
    settings: tuple[bool, torch.dtype, Mapping[int, Origin] | None],
) -> fx.GraphModule:
    """An optimizer's update as one graph; see `UpdateFunction`.

    Args:
        arrangement: what the arguments are.
        optimizer: the optimizer.
        inputs: specs of the arguments.
        lowering: what the backend wants.
        settings: the last arguments of `UpdateFunction`.

    Raises:
        LoweringError: the update cannot be traced.
        NotTraceableError: it does more than change tensors.
    """
    *_, origins = settings
    # Noise is drawn by where an element is in the model, so there no two parameters are equal.
    if type(optimizer) not in ELEMENTWISE or origins is not None:
        function = UpdateFunction(arrangement, optimizer, *settings)
        return trace_program(_NAME, function, inputs, lowering)
    graph = fx.Graph()
    arguments = [graph.placeholder(f"argument_{i}") for i in range(len(inputs))]
    rates = range(arrangement.num_slots, len(inputs))
    traced: dict[Any, fx.GraphModule] = {}
    constants: dict[str, Any] = {}
    results: dict[int, fx.Node] = {}
    for number, places in enumerate(arrangement.places):
        for index in range(len(places)):
            alone, slots = arrangement.alone(number, index)
            taken = [*slots, *rates]
            specs = tuple(inputs[i] for i in taken)
            (own,) = alone.places[number]
            state = optimizer.state.get(alone.trained[number][0], {})
            kind = number, own[:2], tuple(own.state.items()), own.source, python_state(state), specs
            if kind not in traced:
                function = UpdateFunction(alone, optimizer, *settings)
                traced[kind] = trace_program(_NAME, function, specs, lowering)
                constants |= _renamed_constants(traced[kind], f"kind_{len(traced)}")
            part = traced[kind].graph
            holders = part.find_nodes(op="placeholder")
            copies = {h: arguments[i] for h, i in zip(holders, taken, strict=True)}
            values: Any = graph.graph_copy(part, copies)
            for slot, value in zip(alone.changed, values, strict=True):
                results.setdefault(slots[slot], value)  # a count of steps that many share
    graph.output([results[slot] for slot in arrangement.changed])
    graph.lint()
    return fx.GraphModule(constants, graph)


def _renamed_constants(module: fx.GraphModule, prefix: str) -> dict[str, torch.Tensor]:
    """The constants that a graph reads, under names that no other graph has."""
    found: dict[str, torch.Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        name = f"{prefix}_{node.target}"
        found[name] = getattr(module, str(node.target))
        node.target = name
    return found
