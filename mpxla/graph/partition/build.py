"""From the stages of a graph's spine to the complete partition.

Places the nodes that follow, decides which ranks hold which parameters, and adds up what every
stage holds and does. Shared by the partitioners and the partition file, so that a partition looks
the same however it was found. This module must not know how the spine was cut.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpxla.graph.partition.flow import Flow, spread
from mpxla.graph.partition.modules import parents, stage_modules
from mpxla.graph.partition.words import (
    GraphNode,
    Partition,
    SavedTensor,
    StageLoad,
    transfers,
)

__all__ = ["build_partition", "partition_from_copies"]


def build_partition(
    flow: Flow,
    parameter_bytes: Mapping[str, int],
    position: Mapping[int, int],
    placement: tuple[int, ...],
    num_ranks: int,
    fixed: Mapping[str, tuple[int, ...]],
    *,
    objective: float | None = None,
    default_rank: int = 0,
) -> Partition:
    """Complete a partition of which the stages of the spine's nodes are known.

    Parameters that are not `fixed`, that no node reads and that have no sibling are on
    `default_rank`. The objective is the largest share of the compute on one rank by default.
    """
    copies = [tuple(sorted(stages)) for stages in spread(flow, position)]
    ranks = _parameter_ranks(flow.nodes, copies, placement, parameter_bytes, fixed, default_rank)
    return partition_from_copies(
        flow.nodes, copies, placement, num_ranks, ranks, parameter_bytes, objective=objective
    )


def partition_from_copies(
    nodes: Sequence[GraphNode],
    copies: Sequence[tuple[int, ...]],
    placement: tuple[int, ...],
    num_ranks: int,
    parameter_ranks: Mapping[str, tuple[int, ...]],
    parameter_bytes: Mapping[str, int],
    *,
    objective: float | None = None,
) -> Partition:
    """Assemble a partition and its loads from the stages of every node, ascending.

    The objective is the largest share of the compute on one rank by default.
    """
    partition = Partition(
        stage=tuple(stages[0] for stages in copies),
        placement=placement,
        num_ranks=num_ranks,
        replicas={index: stages for index, stages in enumerate(copies) if len(stages) > 1},
        parameter_ranks=dict(parameter_ranks),
        parameter_bytes=dict(parameter_bytes),
        loads=(),
        objective=0.0,
    )
    loads = _loads(nodes, partition)
    if objective is None:
        objective = _largest_share(loads)
    return replace(partition, loads=loads, objective=objective)


def _parameter_ranks(
    nodes: Sequence[GraphNode],
    copies: Sequence[tuple[int, ...]],
    placement: tuple[int, ...],
    parameter_bytes: Mapping[str, int],
    fixed: Mapping[str, tuple[int, ...]],
    default_rank: int,
) -> dict[str, tuple[int, ...]]:
    """Ranks of the readers; a parameter that nobody reads stays with its siblings."""
    readers: dict[str, set[int]] = defaultdict(set)
    for node, stages in zip(nodes, copies, strict=True):
        for name in node.parameters:
            readers[name].update(placement[stage] for stage in stages)
    by_prefix: dict[str, int] = {}
    for name in parameter_bytes:
        if name in readers:
            for prefix in parents(name):
                by_prefix.setdefault(prefix, min(readers[name]))
    ranks: dict[str, tuple[int, ...]] = {}
    for name in parameter_bytes:
        if name in fixed:
            ranks[name] = tuple(sorted(fixed[name]))
        elif name in readers:
            ranks[name] = tuple(sorted(readers[name]))
        else:
            near = (by_prefix[prefix] for prefix in parents(name) if prefix in by_prefix)
            ranks[name] = (next(near, default_rank),)
    return ranks


def _loads(nodes: Sequence[GraphNode], partition: Partition) -> tuple[StageLoad, ...]:
    num_stages = partition.num_stages
    saved: list[set[SavedTensor]] = [set() for _ in range(num_stages)]
    received, sent = [0] * num_stages, [0] * num_stages
    compute_s = [0.0] * num_stages
    parameters: list[dict[str, None]] = [{} for _ in range(num_stages)]
    for index, node in enumerate(nodes):
        for stage in partition.stages_of(index):
            compute_s[stage] += node.cost.compute_s
            saved[stage].update(node.saved)
            parameters[stage].update(dict.fromkeys(node.parameters))
    _add_unread(parameters, partition)
    for index, source, destination in transfers(nodes, partition):
        forward, backward = nodes[index].cost.output_bytes, nodes[index].cost.gradient_bytes
        sent[source] += forward
        received[destination] += forward
        sent[destination] += backward
        received[source] += backward
    modules = stage_modules(nodes, partition)
    return tuple(
        StageLoad(
            stage=stage,
            rank=rank,
            modules=modules[stage],
            parameters=tuple(parameters[stage]),
            parameter_bytes=sum(partition.parameter_bytes[name] for name in parameters[stage]),
            compute_s=compute_s[stage],
            activation_bytes=sum(tensor.num_bytes for tensor in saved[stage]),
            received_bytes=received[stage],
            sent_bytes=sent[stage],
        )
        for stage, rank in enumerate(partition.placement)
    )


def _add_unread(parameters: list[dict[str, None]], partition: Partition) -> None:
    """List parameters that a rank holds without reading them with its first stage."""
    first_stage = {rank: stage for stage, rank in reversed([*enumerate(partition.placement)])}
    for rank, stage in first_stage.items():
        own = [place for place, other in enumerate(partition.placement) if other == rank]
        read = set().union(*(parameters[place] for place in own))
        held = (name for name, ranks in partition.parameter_ranks.items() if rank in ranks)
        parameters[stage].update(dict.fromkeys(name for name in held if name not in read))


def _largest_share(loads: Sequence[StageLoad]) -> float:
    by_rank: dict[int, float] = defaultdict(float)
    for load in loads:
        by_rank[load.rank] += load.compute_s
    total = sum(by_rank.values())
    return max(by_rank.values()) / total if total else 0.0
