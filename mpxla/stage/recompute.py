"""What a stage computes again in its backward, and what it keeps instead.

A value that is computed again is not kept between forward and backward. Which ones those are is
written into the nodes of the joint graph, for torch's partitioner:

    * Nodes of a checkpointed region (`graph/regions.py`) are computed again. What a region reads of
      earlier ones is kept, so that every region starts from its own inputs.
    * Random numbers are kept, never drawn again, and so the backward sees the masks of the forward.
      What follows from them alone (a mask of one byte from numbers of four) may be kept instead.
    * Results of collectives are kept.

This module must not know how many microbatches are in flight.
"""

import operator
from collections.abc import Collection
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import (
    get_default_op_list,
    min_cut_rematerialization_partition,
)
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from mpxla.graph.collectives import is_collective
from mpxla.graph.regions import Layers, Region, region_of
from mpxla.graph.stepgraph import may_draw
from mpxla.graph.typed import input_of

__all__ = ["partition_joint"]


def partition_joint(
    joint: fx.GraphModule, num_outputs: int, share: float = 1.0, again: Collection[int] = ()
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cuts a graph into forward and backward.

    Args:
        joint: as `trace_joint` gives it; may be cut several times.
        num_outputs: how many of its first results are those of the forward.
        share: how much of what it would be dear to compute again is kept: 1 for all, 0 for nothing.
            Between, torch's solver of a knapsack problem chooses, by bytes and operations.
        again: arguments that are gathered for every use; what follows from them alone (a parameter
            in another type) would keep the gathered copy.
    """
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)
    _tag(joint.graph, keeps_nothing=share == 0.0)
    placeholders = [n for n in joint.graph.nodes if n.op == "placeholder"]
    _tag_derived(joint.graph, {placeholders[i] for i in again})
    inputs = [n.meta["val"] for n in placeholders]
    budget = share or 1.0  # torch's 0 would draw random numbers again
    # Its own search for equal nodes would merge random ones; `simplify` has done that part.
    with functorch_config.patch(cse=False, activation_memory_budget=budget):
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_outputs)


def _tag(graph: fx.Graph, keeps_nothing: bool) -> None:
    """Tells the partitioner what to do about every node that it may not decide on.

    It takes operators for random by their tags alone, and would have them draw the same again.
    """
    if keeps_nothing:  # the whole stage is one region
        groups = {n: None for n in graph.nodes if not _is_of_derivative(n)}
        kept: set[fx.Node] = set()
    else:
        groups = _groups(graph)
        kept = _kept_inputs(graph, groups)
    from_random: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes
        if may_draw(node) or (sources and from_random.issuperset(sources)):
            from_random.add(node)
        decision = None
        if may_draw(node) or is_collective(node) or node in kept:
            decision = CheckpointPolicy.MUST_SAVE
        elif node in groups and node not in from_random:
            decision = _decision(node, keeps_nothing)
        if decision is not None:
            node.meta["recompute"] = decision
            node.meta["ac_graph_id"] = 0  # what crosses borders is decided here, not by torch


def _tag_derived(graph: fx.Graph, sources: set[fx.Node]) -> None:
    """Lets all that follows from some arguments alone be computed again."""
    derived = set(sources)
    for node in graph.nodes if sources else ():
        inputs = node.all_input_nodes
        is_free = node.op == "call_function" and not may_draw(node) and not is_collective(node)
        if is_free and inputs and derived.issuperset(inputs) and not _is_of_derivative(node):
            derived.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0


def _decision(node: fx.Node, keeps_nothing: bool) -> CheckpointPolicy | None:
    """For a node of a region that nobody else reads."""
    if node.target is operator.getitem:  # goes with the operator that has several results
        decision = input_of(node).meta.get("recompute")
        return None if decision is CheckpointPolicy.MUST_SAVE else decision
    region = region_of(node)
    if region is None or region.policy is None or keeps_nothing:
        return CheckpointPolicy.MUST_RECOMPUTE
    arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    context = SelectiveCheckpointContext(is_recompute=False)
    chosen = region.policy(context, node.target, *arguments, **keywords)
    is_kept = chosen in (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.MUST_RECOMPUTE


def _is_of_derivative(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _groups(graph: fx.Graph) -> dict[fx.Node, Any]:
    """What every node of a region is computed again together with.

    A group of layers is one of those that the stage has.
    """
    # torch 2.13 gives nodes of the derivative the metadata of other ones, so they have regions too.
    forward = [node for node in graph.nodes if not _is_of_derivative(node)]
    regions = {node: region for node in forward if (region := region_of(node)) is not None}
    present: dict[Layers, dict[int, None]] = {}
    for region in dict.fromkeys(regions.values()):
        if region.layers is not None:
            present.setdefault(region.layers, {})[region.layer] = None
    return {node: _group(region, present) for node, region in regions.items()}


def _group(region: Region, present: dict[Layers, dict[int, None]]) -> Any:
    if region.layers is None:
        return region
    size = region.layers.group_size
    number = sorted(present[region.layers]).index(region.layer)
    return region.layers, 0 if size is None else number // size


def _kept_inputs(graph: fx.Graph, groups: dict[fx.Node, Any]) -> set[fx.Node]:
    """What regions read that depends on earlier regions.

    In the place of a view its argument is kept: the partitioner never saves views for good. What
    depends on no argument (a causal mask, which all blocks share) costs nothing to make again.
    """
    is_view = get_default_op_list().is_view
    after_region: set[fx.Node] = set()
    varying: set[fx.Node] = set()
    kept: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "placeholder" or not varying.isdisjoint(sources):
            varying.add(node)
        if node in varying and (node in groups or not after_region.isdisjoint(sources)):
            after_region.add(node)
        for source in node.all_input_nodes if node in groups else ():
            if source in after_region and groups.get(source) != groups[node]:
                while is_view(source):
                    source = source.all_input_nodes[0]
                kept.add(source)
    return {node for node in kept if node.op == "call_function"}
