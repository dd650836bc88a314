"""The words of partitioning: the graph to cut, the resulting partition, and what travels in it.

These are plain frozen values, shared by the automatic partitioner (``auto.py``), the
manual one (``manual.py``), the report and the partition file, and read by whatever splits
the graph. This module must not know tensors, modules, devices or how a partition is found.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "GraphNode",
    "NodeCost",
    "NodeKind",
    "Partition",
    "SavedTensor",
    "StageLoad",
    "Transfer",
    "check_graph",
    "transfers",
]


class NodeKind(StrEnum):
    """What a node is to the partitioner."""

    INPUT = "input"
    """A placeholder of the step's inputs; it lives on stage 0."""
    COMPUTE = "compute"
    """An operation that may be repeated on several stages if that saves communication."""
    RANDOM = "random"
    """An operation that draws random numbers; two copies would differ, so there is one."""


@dataclass(frozen=True)
class NodeCost:
    """What one execution of a node (one microbatch) costs."""

    compute_s: float = 0.0
    """Estimated seconds, forward and backward together."""
    output_bytes: int = 0
    """Bytes that travel forward when the value crosses a cut; 0 = the value can never cross, so
    that its readers stay on its stage (a tuple that only exists to be unpacked, for instance)."""
    gradient_bytes: int = 0
    """Bytes that travel back when the value crosses a cut; 0 if it is not differentiable."""


class SavedTensor(NamedTuple):
    """A tensor that is kept from the forward to the backward of a microbatch."""

    name: str
    """Unique within the graph."""
    num_bytes: int


@dataclass(frozen=True)
class GraphNode:
    """One operation of the captured step; nodes are listed in program order."""

    name: str
    """Unique within the graph."""
    inputs: tuple[int, ...] = ()
    """Indices of earlier nodes."""
    parameters: tuple[str, ...] = ()
    """Parameters read directly or updated; a tied parameter has one canonical name."""
    buffers: tuple[str, ...] = ()
    """Non-trainable tensors read directly; they can be held by several ranks."""
    mutates: tuple[str, ...] = ()
    """Buffers and parameters this node updates."""
    module_path: str = ""
    """Such as ``model.blocks.3.mlp.up``; empty for the user's own function."""
    kind: NodeKind = NodeKind.COMPUTE
    cost: NodeCost = NodeCost()
    saved: tuple[SavedTensor, ...] = ()
    """What the node's derivative reads. A stage keeps a tensor once, however many of its nodes
    read it, and every stage with a reader keeps it."""

    def described(self) -> str:
        """Name and place for error texts.

        Returns:
            Such as ``'linear_3' (module 'model.head')``.
        """
        where = f"module {self.module_path!r}" if self.module_path else "the step function"
        return f"{self.name!r} ({where})"


class Transfer(NamedTuple):
    """A value that one stage computes and another one reads."""

    node: int
    source: int
    """Stage that sends the value forward (and receives its gradient, if it has one)."""
    destination: int


@dataclass(frozen=True)
class StageLoad:
    """What one stage holds and does, for the report."""

    stage: int
    rank: int
    modules: tuple[str, ...]
    """Compressed module paths in program order, such as ``tok, blocks.0-3, blocks.4.attn``."""
    parameters: tuple[str, ...]
    """Parameters read here; one that several stages read is listed on each."""
    parameter_bytes: int
    """Their weights, gradients and optimizer states."""
    compute_s: float
    """Forward and backward of one microbatch, repeated work included."""
    activation_bytes: int
    """Saved for the backward pass of one microbatch, each tensor once."""
    received_bytes: int
    """Values and gradients received from other stages, per microbatch."""
    sent_bytes: int

    @property
    def cut_bytes(self) -> int:
        """Everything this stage exchanges with other stages, per microbatch."""
        return self.received_bytes + self.sent_bytes


@dataclass(frozen=True)
class Partition:
    """Which stage runs each node, which rank owns each stage, and where parameters live."""

    stage: tuple[int, ...]
    """Stage of every node; the earliest one if the node has copies on several stages."""
    placement: tuple[int, ...]
    """pp_rank of every stage; a rank may own several stages, or none."""
    num_ranks: int
    replicas: Mapping[int, tuple[int, ...]]
    """Nodes computed on more than one stage: node index -> its stages, ascending."""
    parameter_ranks: Mapping[str, tuple[int, ...]]
    """pp_ranks that hold each parameter; several for a tied one. Can be passed on as ``fixed``."""
    parameter_bytes: Mapping[str, int]
    loads: tuple[StageLoad, ...]
    """One per stage."""
    objective: float
    """Automatic: the largest stage cost, which was minimised. Manual: the largest share of the
    compute that one rank has."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """pp_ranks that own no stage."""
        return tuple(sorted(set(range(self.num_ranks)) - set(self.placement)))

    def rank_bytes(self, sizes: Mapping[str, int]) -> list[int]:
        """Bytes of the parameters that every rank holds, given those of each parameter."""
        held = [0] * self.num_ranks
        for name, ranks in self.parameter_ranks.items():
            for rank in ranks:
                held[rank] += sizes[name]
        return held

    def stages_of(self, node: int) -> tuple[int, ...]:
        """All stages that compute a node, ascending; several if the node is replicated."""
        return self.replicas.get(node, (self.stage[node],))


def transfers(nodes: Sequence[GraphNode], partition: Partition) -> tuple[Transfer, ...]:
    """List the values that travel between stages, ordered by node and then by destination.

    A stage that reads a value computes it itself if it has a copy of the node; otherwise it gets
    the value straight from the node's (earliest) stage, however many stages lie between them: once,
    and perhaps on one rank.
    """
    readers: list[set[int]] = [set() for _ in nodes]
    for index, node in enumerate(nodes):
        stages = partition.stages_of(index)
        for source in node.inputs:
            readers[source].update(stages)
    return tuple(
        Transfer(index, partition.stage[index], destination)
        for index, stages in enumerate(readers)
        for destination in sorted(stages.difference(partition.stages_of(index)))
    )


def check_graph(nodes: Sequence[GraphNode], parameter_bytes: Mapping[str, int]) -> None:
    """Stop on a malformed graph, which only a bug in its producer can cause."""
    assert len({node.name for node in nodes}) == len(nodes), "node names are not unique"
    for index, node in enumerate(nodes):
        assert all(0 <= source < index for source in node.inputs), f"{node.name}: not topological"
        unknown = [name for name in node.parameters if name not in parameter_bytes]
        assert not unknown, f"{node.name} reads parameters of unknown size: {unknown}"
        cost = node.cost
        assert math.isfinite(cost.compute_s) and cost.compute_s >= 0, f"{node.name}: {cost}"
        assert min(cost.output_bytes, cost.gradient_bytes) >= 0, node.name
    assert all(size >= 0 for size in parameter_bytes.values())
    saved = {tensor for node in nodes for tensor in node.saved}
    assert len({tensor.name for tensor in saved}) == len(saved), "a saved tensor has two sizes"
    assert all(tensor.num_bytes >= 0 for tensor in saved), "a saved tensor has a negative size"
