"""Cutting a step graph into stages by a given assignment of nodes.

Phases: decide which nodes each stage holds (replicated ones are copied), find the values that
cross borders and which of them carry gradients back, build one graph per stage. The result is the
same on every rank. This module must not know how the assignment was found, nor ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mpxla.graph.functions import hands_back
from mpxla.graph.reaching import reaching, requires_grad
from mpxla.graph.stepgraph import InputKind, InputRole, OutputKind, StepGraph
from mpxla.stage.spec import InputPort, OutputPort, StageSpec, TensorSpec, Transfer

__all__ = [
    "ancestors",
    "backward_transfers",
    "copy_nodes",
    "forward_transfers",
    "split_stages",
    "trained_by",
]


@dataclass(frozen=True)
class _Borders:
    """Facts about the whole graph that every stage's construction needs."""

    roles: Mapping[fx.Node, InputRole]
    stages_of: Mapping[fx.Node, tuple[int, ...]]
    reaches_objective: frozenset[fx.Node]

    def stage_of(self, node: fx.Node) -> int:
        """The stage whose value of `node` the others read."""
        return self.stages_of[node][0]

    def is_crossing(self, node: fx.Node, stage: int) -> bool:
        """Whether `stage` has to receive `node`."""
        if node in self.roles:
            return self.roles[node].kind is InputKind.STEP_INPUT
        return stage not in self.stages_of[node]

    def has_grad(self, node: fx.Node, stage: int) -> bool:
        """Whether `stage` contributes to the gradient of `node`."""
        return requires_grad(node) and any(
            user in self.reaches_objective
            and stage in self.stages_of.get(user, ())
            and hands_back(user, node)
            for user in node.users
        )


def split_stages(
    step: StepGraph, stages_of: Mapping[fx.Node, Sequence[int]], num_stages: int
) -> tuple[StageSpec, ...]:
    """Builds the stages of a step.

    A replicated node has several. A node's stage is never before that of its inputs.
    """
    borders = _Borders(
        step.roles,
        {node: tuple(stages) for node, stages in stages_of.items()},
        frozenset(_reaching(step)),
    )
    return tuple(_build_stage(step, borders, index) for index in range(num_stages))


def forward_transfers(stages: Sequence[StageSpec]) -> tuple[Transfer, ...]:
    """All messages from a stage to a later one, ordered by (source, target).

    Step inputs travel from stage 0. A message may be one between stages of the same rank.
    """
    read = ((port.source or 0, stage.index, port) for stage in stages for port in stage.inputs)
    return _transfers(crossing for crossing in read if crossing[0] != crossing[1])


def backward_transfers(stages: Sequence[StageSpec]) -> tuple[Transfer, ...]:
    """All messages of gradients, from a stage to an earlier one, ordered by (source, target)."""
    return _transfers(
        (stage.index, port.source, port)
        for stage in stages
        for port in stage.inputs
        if port.has_grad and port.source is not None
    )


def _transfers(crossings: Iterable[tuple[int, int, InputPort]]) -> tuple[Transfer, ...]:
    named: dict[tuple[int, int], list[InputPort]] = {}
    for source, target, port in crossings:
        named.setdefault((source, target), []).append(port)
    return tuple(
        Transfer(s, t, tuple(p.name for p in ports), tuple(p.spec for p in ports))
        for (s, t), ports in sorted(named.items())
    )


def trained_by(step: StepGraph) -> set[str]:
    """Parameters that get gradients in a step; in an evaluation, those that want some."""
    reaching = _reaching(step) if step.is_training else step.graph.nodes
    return {
        role.name
        for node, role in step.roles.items()
        if role.kind is InputKind.PARAMETER and node in reaching and requires_grad(node)
    }


def _reaching(step: StepGraph) -> set[fx.Node]:
    ends = [node for node, role in step.ends if role.kind is OutputKind.OBJECTIVE]
    return reaching(step.graph, ends)


def _build_stage(step: StepGraph, borders: _Borders, index: int) -> StageSpec:
    nodes = [n for n in step.graph.nodes if index in borders.stages_of.get(n, ())]
    outside = _outside_inputs(nodes)
    crossing = [n for n in outside if borders.is_crossing(n, index)]
    held = {
        kind: [n for n in outside if n in borders.roles and borders.roles[n].kind is kind]
        for kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT)
    }
    outputs, results, new_buffers, objectives = _stage_outputs(step, borders, nodes, index)
    ordered = [*held[InputKind.PARAMETER], *held[InputKind.BUFFER], *held[InputKind.CONSTANT]]
    graph = copy_nodes(
        [*ordered, *crossing],
        nodes,
        [*outputs, *results.values(), *new_buffers.values(), *objectives],
    )
    return StageSpec(
        index=index,
        graph=graph,
        parameters=tuple(borders.roles[n].name for n in held[InputKind.PARAMETER]),
        trained=tuple(
            borders.roles[n].name for n in held[InputKind.PARAMETER] if borders.has_grad(n, index)
        ),
        buffers=tuple(borders.roles[n].name for n in held[InputKind.BUFFER]),
        constants=tuple(borders.roles[n].name for n in held[InputKind.CONSTANT]),
        inputs=tuple(_input_port(n, borders, index) for n in crossing),
        outputs=tuple(_output_port(n, borders) for n in outputs),
        results=tuple(results),
        result_specs=tuple(TensorSpec.of(n.meta["val"]) for n in results.values()),
        new_buffers=tuple(new_buffers),
        num_objectives=len(objectives),
    )


def _outside_inputs(nodes: list[fx.Node]) -> list[fx.Node]:
    """Placeholders and values of other stages that the nodes read, in the graph's order."""
    held = set(nodes)
    read = (source for node in nodes for source in node.all_input_nodes)
    return list(dict.fromkeys(source for source in read if source not in held))


def _stage_outputs(
    step: StepGraph, borders: _Borders, nodes: list[fx.Node], index: int
) -> tuple[list[fx.Node], dict[int, fx.Node], dict[str, fx.Node], list[fx.Node]]:
    """(values for later stages, results by index, new buffers by name, objectives)."""
    outputs = [n for n in nodes if borders.stage_of(n) == index and _consumers(n, borders)]
    results: dict[int, fx.Node] = {}
    new_buffers: dict[str, fx.Node] = {}
    objectives: list[fx.Node] = []
    for node, role in step.ends:
        assert node not in borders.roles, "what a step returns is a node of its own"
        if borders.stage_of(node) != index:
            continue
        if role.kind is OutputKind.RESULT:
            results[role.index] = node
        elif role.kind is OutputKind.BUFFER:
            new_buffers[role.name] = node
        else:
            objectives.append(node)
    return outputs, results, new_buffers, objectives


def _consumers(node: fx.Node, borders: _Borders) -> tuple[int, ...]:
    """Stages that have to receive the value of `node`."""
    stages = {
        stage
        for user in node.users
        for stage in borders.stages_of.get(user, ())
        if stage not in borders.stages_of[node]
    }
    return tuple(sorted(stages))


def _input_port(node: fx.Node, borders: _Borders, index: int) -> InputPort:
    spec = TensorSpec.of(node.meta["val"])
    role = borders.roles.get(node)
    if role is not None:
        return InputPort(node.name, spec, source=None, leaf=role.index)
    return InputPort(
        node.name, spec, source=borders.stage_of(node), has_grad=borders.has_grad(node, index)
    )


def _output_port(node: fx.Node, borders: _Borders) -> OutputPort:
    consumers = _consumers(node, borders)
    return OutputPort(
        name=node.name,
        spec=TensorSpec.of(node.meta["val"]),
        consumers=consumers,
        grad_sources=tuple(stage for stage in consumers if borders.has_grad(node, stage)),
    )


def ancestors(
    nodes: Iterable[fx.Node], is_end: Callable[[fx.Node], bool] = lambda node: False
) -> set[fx.Node]:
    """The nodes and all that they depend on; of ends no more than the ends themselves."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            if not is_end(node):
                todo += node.all_input_nodes
    return found


def copy_nodes(
    inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.Graph:
    """A graph of some nodes of another one, given in an order in which they can run.

    The inputs become its placeholders, in this order; what it returns is of these and the nodes.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[n] for n in outputs))
    graph.lint()
    return graph
