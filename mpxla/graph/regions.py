"""Checkpointed regions: nodes whose values are computed again for the backward.

While a step is captured, every node of a region gets the region into its metadata, under the key
`custom`, which torch carries along when it traces a graph again (functionalization, derivatives).
A stage computes its own part of a region again; regions end at its borders.

This module must not know how regions are marked or how a stage is lowered.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from mpxla.errors import PartitionError
from mpxla.graph.partition.modules import common_path
from mpxla.graph.stepgraph import StepGraph, module_path

__all__ = ["CHECKPOINTED", "Checkpointed", "Layers", "Region", "check_regions", "region_of", "tag"]

CHECKPOINTED = "_mpxla_checkpointed"
"""Key in a module's `__dict__` of what it was marked with, before any step is captured."""
_KEY = "mpxla_region"


@dataclass(frozen=True)
class Checkpointed:
    """What a module is marked with.

    Attributes:
        is_whole: whether the module is one region; else its layers are (an `nn.Sequential`).
        group_size: how many layers are computed again together; None for as many as a stage has.
    """

    is_whole: bool = True
    group_size: int | None = 1


@dataclass(frozen=True, eq=False)
class Layers:
    """One run of a sequence of checkpointed layers; `group_size` as in `Checkpointed`."""

    group_size: int | None


@dataclass(frozen=True, eq=False)
class Region:
    """One run of a checkpointed function or module.

    Attributes:
        name: for messages.
        is_module: whether it was marked by SMP's API, which wants it on one partition.
        layers: the sequence that it is a layer of, if it is one.
        layer: which one.
        policy: (context, operator, arguments) -> what to do with a value, as
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes it.
    """

    name: str
    is_module: bool = False
    layers: Layers | None = None
    layer: int = 0
    policy: Callable[..., Any] | None = field(default=None, repr=False)


def tag(nodes: Iterable[fx.Node], region: Region) -> None:
    """Says of which region nodes are; of nested ones only the outermost counts."""
    for node in nodes:
        node.meta["custom"] = {**(node.meta.get("custom") or {}), _KEY: region}


def region_of(node: fx.Node) -> Region | None:
    """The region of a node, if it has one."""
    return (node.meta.get("custom") or {}).get(_KEY)


def check_regions(
    step: StepGraph,
    stages_of: Mapping[fx.Node, Sequence[int]],
    placement: Sequence[int],
    is_manual: bool,
) -> list[str]:
    """Checks that modules marked by SMP's API are on one partition each.

    Returns:
        A line for every module that an automatic partition has cut.

    Raises:
        PartitionError: the user has placed parts of such a module on several ranks.
    """
    ranks: dict[Region, set[int]] = {}
    paths: dict[Region, str] = {}
    for node in step.graph.nodes:
        region, stages = region_of(node), stages_of.get(node, ())
        if region is not None and region.is_module and len(stages) == 1:
            ranks.setdefault(region, set()).add(placement[stages[0]])
            path = module_path(node)
            paths[region] = ".".join(common_path(paths.get(region, path), path))
    split = [
        (paths[region] or region.name, sorted(held))
        for region, held in ranks.items()
        if len(held) > 1
    ]
    if split and is_manual:
        name, held = split[0]
        raise PartitionError(
            f"The checkpointed module {name} has parts on pipeline ranks "
            f"{', '.join(map(str, held))}. Place all of it on one (smp.partition, "
            f"smp.set_partition), or checkpoint the modules in it one by one."
        )
    return [
        f"the checkpointed module {name} was cut between pipeline ranks "
        f"{', '.join(map(str, held))}: each keeps the inputs of its part and computes that again"
        for name, held in dict(split).items()
    ]
