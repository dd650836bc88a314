"""State dictionaries of model and optimizer over the ranks of a replica: gather, merge, pick.

A *partial* dictionary holds what one rank owns and says so by `PARTIAL_KEY`; a *full* one is what
the plain single-process model or optimizer would give. Values are host tensors.
(SMP API reference, `state_dict`, `local_state_dict`, `load_state_dict`.)
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from mpxla.comm.objects import Objects
from mpxla.device.backend import Backend
from mpxla.errors import CheckpointError
from mpxla.log import warn_once
from mpxla.nn.shards import Shard

__all__ = [
    "GONE_KEY",
    "HELD_KEY",
    "ORDER_KEY",
    "PARTIAL_KEY",
    "GivenValues",
    "StatePiece",
    "by_position",
    "check_order",
    "gather_full",
    "gather_on_first",
    "gone_of",
    "merge_optimizer_states",
    "numbered",
    "pick_optimizer_state",
    "to_host",
]

PARTIAL_KEY = "_smp_is_partial"
HELD_KEY = "_mpxla_held"
"""In a partial optimizer state: positions of the parameters that the rank updates."""
GONE_KEY = "_mpxla_gone"
"""In a partial optimizer state: positions of parameters that the script has taken out of the groups
of this rank."""
ORDER_KEY = "_mpxla_order"
"""In a partial optimizer state: names of all parameters of the optimizer, by position; None where
no model has it."""


class StatePiece(NamedTuple):
    """One value of the optimizer's state that this rank holds, or a part of it.

    An optimizer that shards its state gives flat parts; checkpoints put them together again under
    any other sharding.
    """

    name: str
    """The parameter."""
    key: str
    """State key, such as "exp_avg", or "Q[0]" of what is in a list, see `nested_state`."""
    value: Any
    """Tensor, on any device, or a number."""
    shape: tuple[int, ...] | None = None
    """Of the whole tensor; None if `value` is the whole."""
    offset: int = 0
    """Position of the first element of a part in the flattened tensor."""
    shard: Shard | None = None
    """Which part of a split tensor `shape` and `offset` are about, if it is split."""


class GivenValues:
    """Copies of a model's values that a script has got; notices when it writes to them."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[torch.Tensor, int]] = {}

    def note(self, values: dict[str, Any]) -> dict[str, Any]:
        """Remembers values, in place of earlier ones; returns them."""
        self._given = {}
        for name, value in values.items():
            if type(value) is torch.Tensor and not (value.is_sparse or value.is_inference()):
                # It counts writes with the value and lets go of its memory: scripts write to
                # values and forget them before anybody can look.
                counter = value.detach()
                counter.data = torch.empty(0, dtype=value.dtype)
                self._given[name] = counter, counter._version
        return values

    def warn_of_writes(self) -> None:
        """Warns, once, of values that were written to and not loaded."""
        found = self._given.items()
        written = [name for name, (counter, version) in found if counter._version != version]
        if written:
            self._given = {}
            warn_once(
                "values of model.state_dict()",
                f"{written[0]} of model.state_dict() was written to in place; that is a copy, and "
                f"the model keeps its own values. If it should take these, call "
                f"model.load_state_dict; for averages of weights, write to model.parameters() or "
                f"to the state dict of copy.deepcopy(model).",
            )


def to_host(values: Any, backend: Backend) -> Any:
    """The same structure with its tensors on the host.

    Those of the device are copied together, also where its memory is the host's: who keeps a state
    to load it again expects it as it was. Other tensors share memory with the originals.
    """
    leaves, structure = pytree.tree_flatten(values)
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    there = {id(t): t for t in tensors.values() if backend.is_on_device(t)}
    copies = dict(zip(there, backend.get(list(there.values())), strict=True))
    for i, tensor in tensors.items():
        leaves[i] = copies[id(tensor)] if id(tensor) in copies else tensor.detach().cpu()
    return pytree.tree_unflatten(leaves, structure)


def gather_full(
    objects: Objects, group: Sequence[int], partial: Mapping[str, Any], order: Iterable[str]
) -> dict[str, Any]:
    """Merges the partial model states of a replica, on the host, with keys in the full one's order.

    Every rank of it must call.
    """
    return _merge(objects.allgather(dict(partial), tuple(group)), order)


def gather_on_first(
    objects: Objects, group: Sequence[int], partial: Mapping[str, Any], order: Iterable[str]
) -> dict[str, Any]:
    """As `gather_full`, on the first rank of the group only; others get an empty dictionary."""
    first, *others = group
    if objects.rank != first:
        objects.send(dict(partial), first)
        return {}
    return _merge((partial, *(objects.recv_from(rank) for rank in others)), order)


def _merge(parts: Iterable[Mapping[str, Any]], order: Iterable[str]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    merged.pop(PARTIAL_KEY, None)
    return {key: merged[key] for key in order if key in merged}


def merge_optimizer_states(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges partial optimizer states (positions count over all parameters) into a full one.

    Raises:
        CheckpointError: there are parameters that none of the parts is of, or the ranks gave their
            optimizers the parameters in different orders.
    """
    check_order(parts)
    state: dict[int, Any] = {}
    for part in parts:
        state.update(part["state"])
    gone = gone_of(parts)
    groups = [
        _only(group, [position for position in group["params"] if position not in gone])
        for group in parts[0]["param_groups"]
    ]
    held = {position for part in parts for position in part.get(HELD_KEY, ())}
    missing = [p for group in groups for p in group["params"] if p not in held]
    if missing and all(HELD_KEY in part for part in parts):
        raise CheckpointError(
            f"the partial optimizer states of {len(parts)} ranks are not complete: none is of "
            f"{len(missing)} parameters of the optimizer (positions {missing[:5]}...). Give every "
            f"rank the state that it saved, under as many ranks as then."
        )
    own = ("state", "param_groups", PARTIAL_KEY, HELD_KEY, GONE_KEY, ORDER_KEY)
    rest = {key: value for key, value in parts[0].items() if key not in own}
    return {**rest, "state": by_position(state), "param_groups": groups}


def gone_of(parts: Sequence[Mapping[str, Any]]) -> set[int]:
    """Positions that scripts have taken out of the groups of all ranks that had them."""
    gone = {position for part in parts for position in part.get(GONE_KEY, ())}
    return gone - {position for part in parts for position in part.get(HELD_KEY, ())}


def _only(group: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """A param group with some of its positions."""
    names: dict[str, list[str]] = {}
    if "param_names" in group:
        name_of = dict(zip(group["params"], group["param_names"], strict=True))
        names = {"param_names": [name_of[position] for position in kept]}
    return {**group, **names, "params": list(kept)}


def numbered(full: Mapping[str, Any]) -> dict[str, Any]:
    """A merged state whose numbers count what is in the groups now, as torch's do."""
    places = [position for group in full["param_groups"] for position in group["params"]]
    numbers = {position: number for number, position in enumerate(places)}
    state = {
        numbers.get(key, key): value
        for key, value in full["state"].items()
        if key in numbers or not isinstance(key, int)
    }
    groups = [
        {**group, "params": [numbers[position] for position in group["params"]]}
        for group in full["param_groups"]
    ]
    return {**full, "state": by_position(state), "param_groups": groups}


def check_order(parts: Sequence[Mapping[str, Any]]) -> None:
    """Checks that positions mean the same parameters in all partial optimizer states.

    Those of earlier versions do not tell.

    Raises:
        CheckpointError: they do not.
    """
    orders = [part[ORDER_KEY] for part in parts if ORDER_KEY in part]
    for other in orders[1:]:
        for position, (first, second) in enumerate(zip(orders[0], other, strict=False)):
            if first != second and None not in (first, second):
                raise CheckpointError(
                    f"the optimizers of two ranks have their parameters in different orders: "
                    f"number {position} is {first} for one and {second} for the other, and a state "
                    f"dict goes by these numbers. A set has another order in every process: give "
                    f"the optimizer lists in the order of model.parameters(). smp.save_checkpoint "
                    f"goes by names and takes any order."
                )


def by_position(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A state in the order of its parameters, and then what is of none (`state["k"]`)."""
    positions = sorted(key for key in state if isinstance(key, int))
    return {key: state[key] for key in dict.fromkeys([*positions, *state])}


def pick_optimizer_state(
    full: Mapping[str, Any], positions: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The state of some parameters, numbered as torch numbers them in a smaller optimizer.

    Positions, for every param group those to keep, count over all parameters.
    """
    pairs = zip(full["param_groups"], positions, strict=True)
    groups = [_only(group, kept) for group, kept in pairs]
    return numbered({"state": full["state"], "param_groups": groups})
