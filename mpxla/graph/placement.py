"""The user's placement of modules, as the nodes of a step see it.

A placed module decides where its nodes run. One whose weights are read by other modules' nodes
alone would be placed in vain, and nobody would notice: that is refused.
This module must not know how stages are formed.
"""

from collections import Counter
from collections.abc import Mapping

from mpxla.errors import PartitionError
from mpxla.graph.partition.modules import parents
from mpxla.graph.stepgraph import InputKind, StepGraph, module_path
from mpxla.graph.user_code import line_of

__all__ = ["check_placement", "rank_of"]

_MODEL = "model"


def rank_of(path: str, pins: Mapping[str, int]) -> int | None:
    """Rank of the innermost placed module on a path such as `model.blocks.3.mlp`, or None."""
    while path and path not in pins:
        path = path.rpartition(".")[0]
    return pins[path] if path else None


def check_placement(
    step: StepGraph,
    pins: Mapping[str, int],
    default_rank: int,
    canonical_names: Mapping[str, str],
) -> None:
    """Checks that every placed module whose weights the step reads runs where it was placed.

    Pins are by the path of the module; all else is on `default_rank`.

    Raises:
        PartitionError: a placed module has no node, and its weights are read on another rank.
    """
    paths = {module_path(node) for node in step.graph.nodes}
    used = paths.union(*map(parents, paths))
    times_named = Counter(canonical_names.values())
    name_in_model = {canonical: name for name, canonical in canonical_names.items()}
    for node, role in step.roles.items():
        if role.kind is not InputKind.PARAMETER or times_named[role.name] > 1:
            continue  # a tied parameter may be read under its other name
        owner = f"{_MODEL}.{name_in_model[role.name]}".rpartition(".")[0]
        wanted = rank_of(owner, pins)
        if wanted is None or owner in used:
            continue
        for reader in node.users:
            path = module_path(reader)
            found = rank_of(path, pins)
            if wanted != (default_rank if found is None else found):
                where = f"the module {path!r}" if path else "the step function"
                raise PartitionError(
                    f"The module {owner!r} is placed on partition {wanted}, but the step never "
                    f"calls it: its parameter {role.name!r} is read by {where}, which is on "
                    f"partition {default_rank if found is None else found}{line_of(reader)}. "
                    f"Call the module itself there, or put both on the same partition."
                )
