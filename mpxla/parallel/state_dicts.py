"""State dictionaries of model and optimizer over the ranks of a replica: gather, merge, pick.

A *partial* dictionary holds what one rank owns and says so by `PARTIAL_KEY`; a *full* one is what
the plain single-process model or optimizer would give. Values are host tensors.
(SMP API reference, `state_dict`, `local_state_dict`, `load_state_dict`.)
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from mpxla.comm.objects import Objects

__all__ = [
    "PARTIAL_KEY",
    "gather_full",
    "merge_optimizer_states",
    "pick_optimizer_state",
    "to_host",
]

PARTIAL_KEY = "_smp_is_partial"


def to_host(values: Any) -> Any:
    """The same structure with host copies of its tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), values)


def gather_full(
    objects: Objects, group: Sequence[int], partial: Mapping[str, Any], order: Iterable[str]
) -> dict[str, Any]:
    """Merges the partial model states of a group; every rank of it must call.

    Args:
        objects: the session's object communication.
        group: global ranks of one replica.
        partial: this rank's state, on the host.
        order: keys of the full state, in order.
    """
    merged: dict[str, Any] = {}
    for part in objects.allgather(dict(partial), tuple(group)):
        merged.update(part)
    merged.pop(PARTIAL_KEY, None)
    return {key: merged[key] for key in order if key in merged}


def merge_optimizer_states(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges partial optimizer states (positions count over all parameters) into a full one."""
    state: dict[int, Any] = {}
    for part in parts:
        state.update(part["state"])
    groups = [dict(group) for group in parts[0]["param_groups"]]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def pick_optimizer_state(
    full: Mapping[str, Any], positions: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The state of some parameters, numbered as torch numbers them in a smaller optimizer.

    Args:
        full: positions count over all parameters.
        positions: for every param group, the positions of the parameters to keep.
    """
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    count = 0
    for group, kept in zip(full["param_groups"], positions, strict=True):
        numbers = list(range(count, count + len(kept)))
        count += len(kept)
        groups.append({**group, "params": numbers})
        for number, position in zip(numbers, kept, strict=True):
            if position in full["state"]:
                state[number] = full["state"][position]
    return {"state": state, "param_groups": groups}
