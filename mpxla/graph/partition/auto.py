"""Automatic partition: the best linear cut of a graph.

The spine of the graph (`flow.py`) is a sequence; nodes that must share a stage are glued
to *pieces*, and a stage is a run of pieces. It costs

    memory_weight       * (parameters + in flight * saved activations) / total memory
  + (1 - memory_weight) * (pace * compute + link * bytes over its two cuts) / total compute

where *in flight* is the most microbatches of which the schedule lets this stage hold activations at
a time, *pace* is by how much a second of this stage's compute lengthens a step, and the bytes over
a cut are all values and gradients alive across it. Whatever the pieces
of a stage share (a parameter, a saved tensor, copied work) counts once, but again on every stage
that has it. The totals are those of the graph on one stage that would hold the mean of the stages'
microbatches in flight. If a rank has several stages, its memory is their sum, but the objective
stays the cost of single stages.

This module puts the graph into those terms; `cuts.py` finds the cuts. It must not know
tensors, modules, schedules or devices.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mpxla.errors import PartitionError
from mpxla.graph.partition.build import build_partition
from mpxla.graph.partition.cuts import Chain, best_cuts
from mpxla.graph.partition.flow import Flow, Group, Role, analyse, last_reader, spread
from mpxla.graph.partition.manual import fixed_ranks, place_by_rank
from mpxla.graph.partition.modules import common_path
from mpxla.graph.partition.words import GraphNode, Partition, SavedTensor, check_graph

__all__ = ["partition_auto"]

Pieces = Sequence[Sequence[int]]
"""Nodes of the spine in cutting order, grouped where no cut is possible."""
Uses = dict[frozenset[int], float]
"""Pieces -> amount of what exactly these pieces use."""


def partition_auto(
    nodes: Sequence[GraphNode],
    parameter_bytes: Mapping[str, int],
    num_stages: int,
    memory_weight: float,
    link: float,
    fixed: Mapping[str, tuple[int, ...]] | None = None,
    *,
    placement: Sequence[int] | None = None,
    in_flight: Sequence[int] | None = None,
    paces: Sequence[float] | None = None,
    may_be_fewer: bool = False,
    twins: Mapping[str, str] | None = None,
) -> Partition:
    """Cut a graph into stages so that the most expensive stage is as cheap as possible.

    Args:
        nodes: The graph, in program order.
        parameter_bytes: Bytes of weights, gradient and optimizer state of every trainable
            parameter, whether or not this graph reads it.
        num_stages: Number of stages; each gets at least one node of the spine.
        memory_weight: Share of memory in the cost of a stage, 0 to 1; the rest is time.
        link: Seconds per byte that crosses a cut.
        fixed: pp_ranks of parameters that have been placed before and must stay. If no
            linear cut respects them, stages are formed as in manual partitioning, and their number
            and placement may differ from what was asked for.
        placement: pp_rank of every stage; stage s is on rank s by default.
        in_flight: Microbatches of which every stage holds activations at a time; 1 by default.
        paces: How much a second of compute of every stage counts; 1 by default.
        may_be_fewer: Whether a graph that is too small for them may have fewer stages.
        twins: Parameters of copies of trained modules, with those of their originals, next to
            which they live if the graph has enough stages then.

    Returns:
        The partition with the smallest largest cost.

    Raises:
        PartitionError: More stages than the graph can be cut into, or arguments out of range.
    """
    check_graph(nodes, parameter_bytes)
    _check_arguments(num_stages, memory_weight, link)
    placement = tuple(range(num_stages)) if placement is None else tuple(placement)
    _check_placement(placement, num_stages)
    in_flight = (1,) * num_stages if in_flight is None else tuple(in_flight)
    assert len(in_flight) == num_stages and min(in_flight) >= 0, in_flight
    paces = (1.0,) * num_stages if paces is None else tuple(paces)
    assert len(paces) == num_stages and min(paces) > 0, paces
    fixed = fixed or {}
    flow = analyse(nodes, link, twins)
    pieces = _glue(flow)
    if twins and len(pieces) < num_stages:
        flow = analyse(nodes, link)
        pieces = _glue(flow)
    num_ranks = max(placement) + 1
    allowed = fixed_ranks(flow, num_ranks, fixed)
    if num_stages > max(len(pieces), 1) and not fixed and not may_be_fewer:
        raise PartitionError(_too_many_stages(flow, pieces, num_stages))
    found = None
    if num_stages <= len(pieces):
        starts = _first_starts(pieces, placement, allowed) if allowed else None
        weights = list(zip(in_flight, paces, strict=True))
        chain = _chain(flow, pieces, parameter_bytes, memory_weight, link, weights, starts)
        found = best_cuts(chain)
    if found is None:
        if twins:  # what is placed already may be apart
            flow = analyse(nodes, link)
        return place_by_rank(flow, parameter_bytes, num_ranks, allowed, fixed)
    cuts, objective = found
    position = {
        index: stage
        for stage, (start, stop) in enumerate(pairwise((0, *cuts, len(pieces))))
        for piece in pieces[start:stop]
        for index in piece
    }
    return build_partition(
        flow, parameter_bytes, position, placement, num_ranks, fixed, objective=objective
    )


def _check_arguments(num_stages: int, memory_weight: float, link: float) -> None:
    problems = []
    if num_stages < 1:
        problems.append(f"the number of stages is {num_stages}; use 1 or more")
    if not 0 <= memory_weight <= 1:
        problems.append(f"memory_weight is {memory_weight}; use a value from 0 to 1")
    if not (math.isfinite(link) and link >= 0):
        problems.append(f"the cost of a byte is {link} seconds; use a finite value from 0")
    if problems:
        raise PartitionError("Cannot partition: " + "; ".join(problems) + ".")


def _check_placement(placement: tuple[int, ...], num_stages: int) -> None:
    if len(placement) != num_stages or placement[0] != 0 or min(placement) < 0:
        raise PartitionError(
            f"Cannot place {num_stages} stages by {placement}: name one rank from 0 per stage, and "
            "rank 0 for stage 0, because rank 0 owns the inputs of the step."
        )


def _glue(flow: Flow) -> list[list[int]]:
    """Split the spine at every place where a cut is possible and of use.

    What is made of a parameter alone, as autocast's casts are, stays with its first reader, which
    comes next. Otherwise a cut could part weight and bias of one layer, and a later step that reads
    both in one operator could not run.
    """
    place = {index: slot for slot, index in enumerate(flow.order)}
    depth = [0] * (len(flow.order) + 1)
    together = [*(group.members for group in flow.groups), *flow.beside.items()]
    for members in together:
        slots = [place[member] for member in members]
        depth[min(slots) + 1] += 1
        depth[max(slots) + 1] -= 1
    pieces: list[list[int]] = []
    is_wanted_next = False
    for index, groups_across in zip(flow.order, accumulate(depth), strict=False):
        if pieces and (groups_across or is_wanted_next):
            pieces[-1].append(index)
        else:
            pieces.append([index])
        is_leaf = index in flow.movable and not flow.nodes[index].inputs
        is_wanted_next = is_leaf and bool(flow.consumers[index])
    return pieces


def _too_many_stages(flow: Flow, pieces: Pieces, num_stages: int) -> str:
    """Say how many stages are possible, and what limits them."""
    most = max(len(pieces), 1)
    text = (
        f"Cannot cut the step into {num_stages} stages: at most {most} "
        f"{'is' if most == 1 else 'are'} possible. It has {len(flow.order)} operations that depend "
        "on parameters, random numbers or what it updates"
    )
    largest = max(pieces, key=len, default=())
    if len(largest) > 1:
        place = {index: slot for slot, index in enumerate(flow.order)}

        def extent(group: Group) -> int:
            slots = [place[member] for member in group.members]
            return max(slots) - min(slots)

        inside = [group for group in flow.groups if group.members[0] in largest]
        reason = max(inside, key=extent).reason if inside else "they are one layer's"
        first, last = flow.nodes[largest[0]], flow.nodes[largest[-1]]
        text += (
            f", of which {len(largest)} cannot be separated, from {first.described()} to "
            f"{last.described()}: {reason}"
        )
    return text + ". Lower pipeline_parallel_degree, or use a model with more operations."


def _first_starts(
    pieces: Pieces, placement: tuple[int, ...], allowed: Mapping[int, frozenset[int]]
) -> NDArray[np.int64]:
    """[K + 1, S] earliest start of stage s if it ends at a position, by the allowed ranks."""
    blocked_until = np.zeros((len(pieces) + 1, len(placement)), dtype=np.int64)
    for slot, piece in enumerate(pieces):
        for index in piece:
            if index in allowed:
                is_wrong = [rank not in allowed[index] for rank in placement]
                blocked_until[slot + 1, is_wrong] = slot + 1
    return np.maximum.accumulate(blocked_until, axis=0)


def _chain(
    flow: Flow,
    pieces: Pieces,
    parameter_bytes: Mapping[str, int],
    memory_weight: float,
    link: float,
    weights: Sequence[tuple[int, float]],
    first_start: NDArray[np.int64] | None,
) -> Chain:
    """Put pieces, shared things and cuts into one unit: shares of the totals.

    The layers: what is there once, what every microbatch in flight has, compute. `weights` gives
    every stage's microbatches in flight and its pace.
    """
    position = {index: slot for slot, piece in enumerate(pieces) for index in piece}
    copies = spread(flow, position)
    parameters: dict[str, set[int]] = defaultdict(set)
    saved: dict[SavedTensor, set[int]] = defaultdict(set)
    for node, slots in zip(flow.nodes, copies, strict=True):
        for name in node.parameters:
            parameters[name].update(slots)
        for tensor in node.saved:
            saved[tensor].update(slots)
    costs = [node.cost for node in flow.nodes]
    total_memory = sum(parameter_bytes[name] for name in parameters)
    mean_in_flight = sum(count for count, _ in weights) / len(weights)
    total_memory += sum(tensor.num_bytes for tensor in saved) * mean_in_flight
    total_compute = sum(cost.compute_s for cost in costs)
    per_byte = memory_weight / total_memory if total_memory else 0.0
    per_second = (1 - memory_weight) / total_compute if total_compute else 0.0
    once: Uses = defaultdict(float)
    per_microbatch: Uses = defaultdict(float)
    compute: Uses = defaultdict(float)
    if per_byte == per_second == 0:
        for slot, piece in enumerate(pieces):
            once[frozenset((slot,))] = len(piece) / len(position)
    for name, slots in parameters.items():
        once[frozenset(slots)] += per_byte * parameter_bytes[name]
    for slots, cost in zip(copies, costs, strict=True):
        compute[slots] += per_second * cost.compute_s
    for tensor, slots in saved.items():
        per_microbatch[frozenset(slots)] += per_byte * tensor.num_bytes
    cut_bytes = _cut_bytes(flow, copies, len(pieces))
    upper, shared = _prefix_sums((once, per_microbatch, compute), len(pieces))
    return Chain(
        upper=upper,
        shared=shared,
        weights=np.array([(1.0, *weight) for weight in weights]),
        crossing=np.array(cut_bytes, dtype=np.float64) * (per_second * link),
        preference=list(zip(_boundary_depths(flow, pieces), cut_bytes, strict=True)),
        first_start=first_start,
    )


def _prefix_sums(
    layers: Sequence[Uses], num_pieces: int
) -> tuple[NDArray[np.float64], list[list[tuple[int, list[float]]]]]:
    """Amounts of the pieces with shared things at every use, and the surplus."""
    upper = np.zeros((len(layers), num_pieces + 1))
    shared: list[list[tuple[int, list[float]]]] = [[] for _ in range(num_pieces)]
    for layer, uses in enumerate(layers):
        for slots, amount in uses.items():
            if amount == 0:
                continue
            ordered = sorted(slots)
            upper[layer, [slot + 1 for slot in ordered]] += amount
            surplus = [0.0] * len(layers)
            surplus[layer] = amount
            for previous, slot in pairwise(ordered):
                shared[slot].append((previous, surplus))
    return upper.cumsum(axis=1), shared


def _cut_bytes(flow: Flow, copies: Sequence[frozenset[int]], num_pieces: int) -> list[int]:
    """[K + 1] bytes of values and gradients alive across each position, zero at both ends."""
    change = [0] * (num_pieces + 1)
    for index, node in enumerate(flow.nodes):
        if flow.roles[index] in (Role.CONSTANT, Role.LOCAL):
            continue
        size = node.cost.output_bytes + node.cost.gradient_bytes
        change[min(copies[index]) + 1] += size
        if (last := last_reader(flow, copies, index)) < num_pieces:
            change[last + 1] -= size
    crossing = list(accumulate(change))
    assert crossing[0] == crossing[-1] == 0
    return crossing


def _boundary_depths(flow: Flow, pieces: Pieces) -> list[int]:
    """[K + 1] how deep in the module tree each position cuts; zero at both ends."""
    depths = [0]
    for before, after in pairwise(pieces):
        left, right = flow.module_path(before[-1]), flow.module_path(after[0])
        depths.append(len(common_path(left, right)))
    return [*depths, 0]
