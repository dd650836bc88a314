"""A partition as JSON-able data by names, to be decided once and used again.

The file holds decisions only (stages, ranks); what they amount to is computed again from the graph.
Since people may edit such a file, loading checks everything that splitting and running rely on.
This module must not know how a partition is found, nor where the data is stored.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from mpxla.errors import PartitionError
from mpxla.graph.partition.build import partition_from_copies
from mpxla.graph.partition.flow import Role, analyse
from mpxla.graph.partition.words import GraphNode, Partition, check_graph

__all__ = ["load_partition", "save_partition"]

VERSION = 1
REMEDY = "Delete the partition file to have the partition computed again."


def save_partition(partition: Partition, nodes: Sequence[GraphNode]) -> dict[str, Any]:
    """Turn a partition of a graph into plain data, fit for `json.dump`."""
    return {
        "version": VERSION,
        "num_ranks": partition.num_ranks,
        "placement": list(partition.placement),
        "objective": partition.objective,
        "nodes": [
            {"name": node.name, "stages": list(partition.stages_of(index))}
            for index, node in enumerate(nodes)
        ],
        "parameters": {
            name: {"ranks": list(ranks), "bytes": partition.parameter_bytes[name]}
            for name, ranks in partition.parameter_ranks.items()
        },
    }


def load_partition(data: Mapping[str, Any], nodes: Sequence[GraphNode]) -> Partition:
    """Turn what `save_partition` gave into a partition of the same graph.

    Raises:
        PartitionError: The data belongs to another graph (the first difference is named), is
            damaged, or asks for something impossible.
    """
    try:
        version = data["version"]
        if version != VERSION:
            raise PartitionError(
                f"The saved partition has version {version!r}, this one reads {VERSION}. {REMEDY}"
            )
        num_ranks, objective = int(data["num_ranks"]), float(data["objective"])
        placement = tuple(map(int, data["placement"]))
        saved = [(node["name"], tuple(sorted(map(int, node["stages"])))) for node in data["nodes"]]
        ranks = {
            name: tuple(sorted(map(int, entry["ranks"])))
            for name, entry in data["parameters"].items()
        }
        sizes = {name: int(entry["bytes"]) for name, entry in data["parameters"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, PartitionError):
            raise
        what = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise PartitionError(f"This is not a saved partition ({what}). {REMEDY}") from error
    _check_same_graph([name for name, _ in saved], ranks, nodes)
    check_graph(nodes, sizes)
    copies = [stages for _, stages in saved]
    _check_ranges(copies, placement, num_ranks, ranks, nodes)
    _check_flow(copies, nodes)
    _check_holders(copies, placement, ranks, nodes)
    return partition_from_copies(
        nodes, copies, placement, num_ranks, ranks, sizes, objective=objective
    )


def _refuse(what: str) -> None:
    raise PartitionError(f"The saved partition does not fit: {what}. {REMEDY}")


def _check_same_graph(
    saved: Sequence[str], parameters: Mapping[str, Any], nodes: Sequence[GraphNode]
) -> None:
    names = [node.name for node in nodes]
    for place, (old, new) in enumerate(zip_longest(saved, names)):
        if old != new:
            was = "missing" if old is None else repr(old)
            now = "missing" if new is None else repr(new)
            _refuse(f"operation {place} is {now} in this step and {was} in the file")
    for node in nodes:
        for name in node.parameters:
            if name not in parameters:
                _refuse(f"{node.name!r} reads the parameter {name!r}, which the file does not have")


def _check_ranges(
    copies: Sequence[tuple[int, ...]],
    placement: Sequence[int],
    num_ranks: int,
    parameter_ranks: Mapping[str, tuple[int, ...]],
    nodes: Sequence[GraphNode],
) -> None:
    stages, ranks = range(len(placement)), range(num_ranks)
    if not placement or not set(placement).issubset(ranks):
        _refuse(f"its placement {list(placement)} needs ranks outside of its {num_ranks}")
    for node, own in zip(nodes, copies, strict=True):
        if not own or not set(own).issubset(stages):
            _refuse(f"{node.name!r} is on stages {list(own)} of {len(placement)}")
    for name, held in parameter_ranks.items():
        if not held or not set(held).issubset(ranks):
            _refuse(f"the parameter {name!r} is on ranks {list(held)} of {num_ranks}")


def _check_flow(copies: Sequence[tuple[int, ...]], nodes: Sequence[GraphNode]) -> None:
    """Data flows forward, single nodes are single, and groups are together."""
    flow = analyse(nodes, link=0.0)
    for index, (node, own) in enumerate(zip(nodes, copies, strict=True)):
        home = own[0]
        if len(own) > 1 and flow.roles[index] in (Role.SPINE, Role.INPUT):
            _refuse(f"{node.name!r} is on stages {list(own)}, but it must not be repeated")
        for source in node.inputs:
            if copies[source][0] > home:
                _refuse(
                    f"{node.name!r} is on stage {home}, before its input {nodes[source].name!r} "
                    f"on stage {copies[source][0]}"
                )
            if nodes[source].cost.output_bytes == 0 and flow.roles[source] is not Role.INPUT:
                missing = set(own).difference(copies[source])
                if missing:
                    _refuse(
                        f"{node.name!r} is on stage {min(missing)}, where its input "
                        f"{nodes[source].name!r} cannot travel"
                    )
        if flow.roles[index] is Role.INPUT and own != (0,):
            _refuse(f"the input {node.name!r} is on stages {list(own)}, but inputs are on stage 0")
    for group in flow.groups:
        if len({copies[member] for member in group.members}) > 1:
            first, last = nodes[group.members[0]].name, nodes[group.members[-1]].name
            _refuse(f"{first!r} and {last!r} are on different stages, but {group.reason}")


def _check_holders(
    copies: Sequence[tuple[int, ...]],
    placement: Sequence[int],
    parameter_ranks: Mapping[str, tuple[int, ...]],
    nodes: Sequence[GraphNode],
) -> None:
    for node, own in zip(nodes, copies, strict=True):
        for name in node.parameters:
            for rank in {placement[stage] for stage in own}.difference(parameter_ranks[name]):
                _refuse(f"{node.name!r} on rank {rank} reads {name!r}, which is not held there")
