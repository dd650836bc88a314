"""Small graphs for the partitioner's tests, and what a partition must satisfy by definition.

The oracles here read the finished partition only and share no code with the partitioners.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from mpxla.graph.partition.auto import partition_auto
from mpxla.graph.partition.words import GraphNode, NodeCost, NodeKind, Partition, SavedTensor

PARAMETER_BYTES = 100


class Program:
    """Builds a graph node by node; every method returns the new node's index."""

    def __init__(self):
        self.nodes: list[GraphNode] = []
        self.parameter_bytes: dict[str, int] = {}

    def add(
        self,
        *inputs: int,
        parameters: Sequence[str] = (),
        path: str = "",
        kind: NodeKind = NodeKind.COMPUTE,
        compute: float = 1.0,
        memory: int = 0,
        output: int = 1,
        gradient: int = 0,
        buffers: Sequence[str] = (),
        mutates: Sequence[str] = (),
        saved: Sequence[SavedTensor] = (),
    ) -> int:
        for name in parameters:
            self.parameter_bytes.setdefault(name, PARAMETER_BYTES)
        name = f"node_{len(self.nodes)}"
        self.nodes.append(
            GraphNode(
                name=name,
                inputs=inputs,
                parameters=tuple(parameters),
                buffers=tuple(buffers),
                mutates=tuple(mutates),
                module_path=path,
                kind=kind,
                cost=NodeCost(compute, output, gradient),
                saved=(*saved, *([SavedTensor(name, memory)] if memory else ())),
            )
        )
        return len(self.nodes) - 1

    def recost(self, index: int, **changes) -> None:
        """Change some costs of a node."""
        node = self.nodes[index]
        self.nodes[index] = replace(node, cost=replace(node.cost, **changes))

    def input(self, output: int = 1) -> int:
        return self.add(kind=NodeKind.INPUT, compute=0.0, output=output)

    def layer(self, source: int, name: str, **cost) -> int:
        return self.add(source, parameters=(f"{name}.weight",), path=name, **cost)


def chain(num_layers: int, **cost) -> Program:
    """An input and layers `model.0`, `model.1`, ... with a parameter each."""
    program = Program()
    last = program.input()
    for number in range(num_layers):
        last = program.layer(last, f"model.{number}", **cost)
    return program


def stage_costs(
    program: Program,
    partition: Partition,
    memory_weight: float,
    link: float,
    in_flight: Sequence[int] | None = None,
    paces: Sequence[float] | None = None,
) -> list[float]:
    """The objective's terms, computed from their definition."""
    nodes = program.nodes
    counts = in_flight or [1] * partition.num_stages
    paces = paces or [1.0] * partition.num_stages
    read = {name for node in nodes for name in node.parameters}
    total_memory = sum(program.parameter_bytes[name] for name in read)
    total_memory += saved_bytes(nodes) * sum(counts) / len(counts)
    total_compute = sum(node.cost.compute_s for node in nodes)
    crossing = cut_bytes(nodes, partition)
    costs = []
    for stage in range(partition.num_stages):
        own = [i for i in range(len(nodes)) if stage in partition.stages_of(i)]
        held = {name for i in own for name in nodes[i].parameters}
        memory = sum(program.parameter_bytes[name] for name in held)
        memory += counts[stage] * saved_bytes([nodes[i] for i in own])
        seconds = paces[stage] * sum(nodes[i].cost.compute_s for i in own)
        seconds += link * (crossing[stage] + crossing[stage + 1])
        costs.append(
            memory_weight * (memory / total_memory if total_memory else 0)
            + (1 - memory_weight) * (seconds / total_compute if total_compute else 0)
        )
    return costs


def saved_bytes(nodes: Sequence[GraphNode]) -> int:
    """What the derivatives of nodes read, every tensor once."""
    return sum(size for _, size in {tensor for node in nodes for tensor in node.saved})


def cut_bytes(nodes: Sequence[GraphNode], partition: Partition) -> list[int]:
    """Bytes of values and gradients alive across the cuts before stages 0, 1, ..., S."""
    last = list(partition.stage)
    for reader, node in enumerate(nodes):
        for source in node.inputs:
            missing = set(partition.stages_of(reader)) - set(partition.stages_of(source))
            last[source] = max([last[source], *missing])
    return [
        sum(
            node.cost.output_bytes + node.cost.gradient_bytes
            for node, first, final in zip(nodes, partition.stage, last, strict=True)
            if first < cut <= final
        )
        for cut in range(partition.num_stages + 1)
    ]


def contiguous_stages(num_nodes: int, num_stages: int) -> Iterator[list[int]]:
    """All ways to give a sequence of nodes to stages in order, none of them empty."""
    for cuts in combinations(range(1, num_nodes), num_stages - 1):
        edges = (0, *cuts, num_nodes)
        yield [stage for stage, (a, b) in enumerate(pairwise(edges)) for _ in range(b - a)]


def assert_valid(program: Program, partition: Partition) -> None:
    """Check everything that must hold for any partition of the program."""
    nodes = program.nodes
    updated = {name for node in nodes for name in node.mutates}
    users: dict[str, set[int]] = defaultdict(set)
    readers: dict[str, set[int]] = defaultdict(set)
    for index, node in enumerate(nodes):
        own = partition.stages_of(index)
        assert own and own == tuple(sorted(set(own)))
        assert partition.stage[index] == own[0]
        assert set(own) <= set(range(partition.num_stages))
        touched = updated.intersection((*node.buffers, *node.mutates))
        if node.kind is not NodeKind.COMPUTE or node.parameters or touched:
            assert len(own) == 1, f"{node.name} must be single"
        if node.kind is NodeKind.INPUT:
            assert own == (0,)
        for source in node.inputs:
            assert partition.stage[source] <= own[0], f"{node.name} runs before its input"
            if nodes[source].cost.output_bytes == 0 and nodes[source].kind is not NodeKind.INPUT:
                assert set(own) <= set(partition.stages_of(source))
        for name in touched:
            users[name].update(own)
        for name in node.parameters:
            readers[name].update(partition.placement[stage] for stage in own)
    assert all(len(stages) == 1 for stages in users.values())
    assert partition.parameter_ranks.keys() == program.parameter_bytes.keys()
    for name, ranks in readers.items():
        assert ranks <= set(partition.parameter_ranks[name])


def brute_force(
    program: Program,
    spine: Sequence[int],
    num_stages: int,
    memory_weight: float,
    link: float,
    is_allowed=lambda stage: True,
    in_flight: Sequence[int] | None = None,
    paces: Sequence[float] | None = None,
) -> list[tuple[float, dict[int, int]]]:
    """(cost, stage of every spine node) of all linear cuts of a sequence that `is_allowed`."""
    found = []
    for stages in contiguous_stages(len(spine), num_stages):
        stage = dict(zip(spine, stages, strict=True))
        if is_allowed(stage):
            partition = completed(program, stage, num_stages)
            costs = stage_costs(program, partition, memory_weight, link, in_flight, paces)
            found.append((max(costs), stage))
    return found


def completed(program: Program, stage: Mapping[int, int], num_stages: int) -> Partition:
    """Inputs on stage 0, all other nodes that are not given a stage wherever they are read."""
    copies: dict[int, set[int]] = {}
    for index in reversed(range(len(program.nodes))):
        readers = [i for i, node in enumerate(program.nodes) if index in node.inputs]
        if index in stage:
            copies[index] = {stage[index]}
        elif program.nodes[index].kind is NodeKind.INPUT or not readers:
            copies[index] = {0}
        else:
            copies[index] = set().union(*(copies[reader] for reader in readers))
    return Partition(
        stage=tuple(min(copies[index]) for index in range(len(program.nodes))),
        placement=tuple(range(num_stages)),
        num_ranks=num_stages,
        replicas={i: tuple(sorted(own)) for i, own in copies.items() if len(own) > 1},
        parameter_ranks={},
        parameter_bytes={},
        loads=(),
        objective=0.0,
    )


def partition(
    program: Program,
    num_stages: int,
    memory_weight: float = 0.0,
    link: float = 0.0,
    **options: Any,
) -> Partition:
    """Partitions automatically, and checks what must always hold."""
    result = partition_auto(
        program.nodes, program.parameter_bytes, num_stages, memory_weight, link, **options
    )
    assert_valid(program, result)
    return result
