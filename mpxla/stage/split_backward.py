"""Splitting a stage's backward into input gradients (I) and weight gradients (W).

Earlier stages wait for the gradients of a stage's inputs, and nobody for those of its weights (Qi
et al., "Zero Bubble Pipeline Parallelism", ICLR 2024). Both come from one derivative, so it is cut,
not run twice. Phases:

    phase 1, cut:      I is what the input gradients depend on; W is the rest.
    phase 2, border:   values of I that W reads are results of I. Views and seeds cost nothing: W
                       makes them again, and their argument crosses the border.

    I: (saved, gradients of outputs, seed)        -> (gradients of inputs, crossing values)
    W: (accumulators, kept arguments, crossing)   -> (accumulators)

What W does not read of the saved values is free after I; what crosses is kept in addition. A stage
without inputs that have a gradient has no I, and one without trained parameters no W. This module
must not know schedules.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from mpxla.graph.collectives import is_collective
from mpxla.graph.split import ancestors, copy_nodes
from mpxla.graph.typed import outputs_of
from mpxla.stage.cleanup import is_view
from mpxla.stage.lower import LoweredStage
from mpxla.stage.pieces import TURN
from mpxla.stage.spec import TensorSpec

__all__ = ["Part", "SplitBackward", "split_backward"]


@dataclass(frozen=True)
class Part:
    """One program of a split backward.

    Attributes:
        graph: graph module, on tensors of the device.
        inputs: specs of its arguments.
        arguments: which arguments of the whole backward it takes, counted after the accumulators.
    """

    graph: fx.GraphModule
    inputs: tuple[TensorSpec, ...]
    arguments: tuple[int, ...]


@dataclass(frozen=True)
class SplitBackward:
    """The two parts of a stage's backward.

    Attributes:
        input_part: gives gradients of inputs, then crossing values; None without such gradients.
        weight_part: takes accumulators, `arguments`, crossing values; None without parameters.
        num_input_grads: how many gradients of inputs there are.
        crossing: specs of the values that go from the first part to the second.
    """

    input_part: Part | None
    weight_part: Part | None
    num_input_grads: int
    crossing: tuple[TensorSpec, ...]

    @property
    def crossing_bytes(self) -> int:
        """Bytes kept between the two parts in addition to saved values, for one microbatch."""
        return sum(spec.num_bytes for spec in self.crossing)


def split_backward(lowered: LoweredStage, device: torch.device) -> SplitBackward:
    """Cuts the backward of a stage, which was lowered for a device with an index, in two."""
    assert lowered.backward is not None, "only a stage with a backward can be split"
    whole = lowered.backward.flat(lowered.backward_inputs, device).graph
    results = outputs_of(whole)
    accumulators = results[: lowered.num_accumulators]
    input_grads = results[lowered.num_accumulators :]
    first = ancestors(input_grads)
    first -= {node for node in first if node.op == "placeholder"}
    second = {n for n in ancestors(accumulators) if n.op != "placeholder" and n not in first}
    picked = {n for n in second if n.target is operator.getitem and n.args[0] in first}
    first |= picked  # tuples cannot cross, their elements can
    second -= picked
    crossing = _crossing(first, second, accumulators)
    placeholders = [node for node in whole.nodes if node.op == "placeholder"]
    specs = dict(zip(placeholders, lowered.backward_inputs, strict=True))
    number = {node: i for i, node in enumerate(placeholders[lowered.num_accumulators :])}
    own = placeholders[: lowered.num_accumulators]
    root = lowered.backward.derivative  # holds constants, if there are any

    def part(
        held: set[fx.Node],
        results: Sequence[fx.Node],
        first_arguments: Sequence[fx.Node] = (),
        last_arguments: Sequence[fx.Node] = (),
    ) -> Part:
        """A graph of the held nodes, in order; arguments that they do not read are left out."""
        nodes = [node for node in whole.nodes if node in held]
        read = {source for node in nodes for source in node.all_input_nodes} | set(results)
        taken = [node for node in number if node in read]
        arguments = [*first_arguments, *taken, *last_arguments]
        return Part(
            fx.GraphModule(root, copy_nodes(arguments, nodes, results)),
            tuple(specs.get(node) or TensorSpec.of(node.meta["val"]) for node in arguments),
            tuple(number[node] for node in taken),
        )

    return SplitBackward(
        part(first, [*input_grads, *crossing]) if input_grads else None,
        part(second, accumulators, own, crossing) if accumulators else None,
        len(input_grads),
        tuple(TensorSpec.of(node.meta["val"]) for node in crossing),
    )


def _crossing(
    first: set[fx.Node], second: set[fx.Node], results: Sequence[fx.Node]
) -> list[fx.Node]:
    """Phase 2: values of `first` that `second` reads; views of them join `second`.

    So do gathers of parameters, of which nothing whole is to be kept between the parts, and what is
    not of the derivative itself and has no known shape: the expanded seed and sums of gradients
    that arrive from several stages.
    """
    crossing: dict[fx.Node, None] = {}
    todo = [source for node in second for source in node.all_input_nodes]
    todo += results
    while todo:
        node = todo.pop()
        if node not in first or node in crossing:
            continue
        if is_view(node) or "val" not in node.meta or _is_gathered(node):
            second.add(node)
            todo += node.all_input_nodes
        else:
            crossing[node] = None
    return sorted(crossing, key=lambda node: node.name)


def _is_gathered(node: fx.Node) -> bool:
    """Whether a node gathers a parameter, or waits for that."""
    return any(TURN in n.meta for n in (node, *node.all_input_nodes) if is_collective(node))
