"""The state of a distributed optimizer in the forms in which it is saved and loaded.

    by position   as torch's state dict of the plain optimizer: whole, or this rank's part of it
    by name       for checkpoints, so that the topology may change

Masters are entries of the state, under `MASTER_KEY`, which the inner optimizer never sees. This
file must not know when a state is saved, nor which ranks take part.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpxla.device.backend import Backend
from mpxla.errors import CheckpointError
from mpxla.log import warn_once
from mpxla.nn.shards import Shard
from mpxla.parallel.gradients.loss_scale import LossScale
from mpxla.parallel.state_dicts import (
    GONE_KEY,
    HELD_KEY,
    ORDER_KEY,
    PARTIAL_KEY,
    StatePiece,
    pick_optimizer_state,
    to_host,
)
from mpxla.parallel.updates.groups import Groups, parameters_of
from mpxla.parallel.updates.nested_state import flattened, mapped, restored
from mpxla.parallel.updates.pieces import SHARD_KEY, OptimizerPieces
from mpxla.parallel.updates.python import state_of_no_parameter
from mpxla.parallel.updates.stochastic_rounding import Origin, StochasticRounding

if TYPE_CHECKING:
    from mpxla.checkpoint.shards import ShardReader
    from mpxla.parallel.model import DistributedModel

__all__ = ["MASTER_KEY", "Numbers", "OptimizerState"]

_NUMBERS = ("loss_scale", "stochastic_rounding")
"""Names of what is saved for an optimizer as a whole, also as keys of its state dict."""
MASTER_KEY = "master_param"
"""State key of a parameter's wider copy."""
_PREFIX = "_mpxla_"
_STATE = f"{_PREFIX}state"
"""Of keys in the settings of the first group that belong to no group: the loss scale."""
_REST = f"{_PREFIX}rest"
"""What the state dict of the inner optimizer has beside state and groups."""
_OF_RANK = ("params", "param_names")
"""Keys of a param group that are about this rank's parameters."""


Numbers = LossScale | StochasticRounding
"""What changes from step to step and belongs to a whole optimizer."""


class OptimizerState:
    """State and settings of an inner optimizer, numbered and named as in the plain one.

    Numbers are saved with the settings as well: the loss scale of `fp16: True`, seed and count of
    stochastic rounding.

    Attributes:
        optimizer: the inner one, made with all parameters.
        models: whose parameters it holds; may become more.
        groups: what is in its groups.
        positions: in the plain optimizer, of all that is or was in the groups, by its id.
        pieces: the update copies that it holds in the place of parameters.
        elsewhere: ids of parameters that other ranks were found to have.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        models: "Sequence[DistributedModel]",
        backend: Backend,
        numbers: Mapping[str, Numbers] | None = None,
    ):
        self._numbers = dict(numbers or {})
        self.optimizer = optimizer
        self.models = models
        self._backend = backend
        self.groups = Groups(optimizer)
        self.positions = self.groups.positions
        named = (group for group in optimizer.param_groups if "param_names" in group)
        self._param_names = {
            self.positions[id(p)]: name
            for group in named
            for p, name in zip(group["params"], group["param_names"], strict=True)
        }
        self.pieces = OptimizerPieces(optimizer, self.positions)
        self.elsewhere: set[int] = set()
        self._saved_rest: dict[str, Any] = {}  # of a checkpoint whose entries are loaded later

    @property
    def group_sizes(self) -> list[int]:
        """Parameters in every group of the plain optimizer."""
        return list(map(len, self.groups.orders))

    def notice_groups(self) -> bool:
        """Takes in what scripts have changed of the groups; whether these have got parameters."""
        has_more = self.groups.notice()
        taken = self.groups.taken
        if copies := taken and taken & self.pieces.positions_of_copies:
            first = self._names()[min(copies)]
            warn_once(
                "copies taken out of param groups",
                f"{len(copies)} parameters were taken out of a group of optimizer.param_groups, "
                f"{first} among them, and are not updated any more. What the groups hold are "
                f"masters or parts of the model's parameters, which are none of "
                f"model.parameters(): if the script has compared these, it has taken out all. Make "
                f"a new optimizer of those that remain.",
            )
        for group in self.optimizer.param_groups:
            if len(names := group.get("param_names", ())) == len(group["params"]):
                places = (self.positions[id(p)] for p in group["params"])
                self._param_names.update(zip(places, names, strict=True))
        return has_more

    # --- by position ----------------------------------------------------------------------------

    def _inner(self) -> tuple[dict[Any, Any], list[dict[str, Any]], dict[str, Any]]:
        """The state dict of the inner optimizer: state, groups, and what it has beside them.

        Optimizers that wrap others may have a form of their own.

        Raises:
            CheckpointError: there are several stages, and the rest may be about parameters.
        """
        state, held = self.optimizer.state, set(map(id, parameters_of(self.optimizer)))
        for key in list(state):  # scripts that ask for one leave an empty entry, as torch's does
            if torch.is_tensor(key) and id(key) not in held and state[key] == {}:
                del state[key]
        rest = dict(self.optimizer.state_dict())
        state, groups = rest.pop("state", {}), rest.pop("param_groups", None)
        strange = [key for key, value in rest.items() if not _is_plain(value)]
        if strange and any(model.num_stages > 1 for model in self.models):
            raise CheckpointError(
                f"the state dict of {type(self.optimizer).__name__} has {strange[0]!r} beside "
                f"'state' and 'param_groups', and nobody knows how to put together that of several "
                f"stages. Save optimizer.orig_state_dict() on every rank, and load it into the "
                f"optimizer that was wrapped (optimizer.optimizer.load_state_dict), with the same "
                f"stages."
            )
        return state, groups or self.optimizer.param_groups, rest

    def of_rank(self, is_divided: bool) -> dict[str, Any]:
        """The state of what this rank updates, on the host: of ranges of pieces, if divided."""
        self.pieces.renew()
        self.groups.notice()
        self.groups.remember()
        inner, inner_groups, rest = self._inner()
        held = parameters_of(self.optimizer)
        local = [self.positions[id(p)] for p in held]
        state = {local[key] if isinstance(key, int) else key: entry for key, entry in inner.items()}
        for position, parameter in zip(local, held, strict=True):
            if self.pieces.is_wide(parameter):
                state[position] = {**state.get(position, {}), MASTER_KEY: parameter}
        groups = [
            {**group, **self._names_in(group, order), "params": list(order)}
            for group, order in zip(inner_groups, self.groups.orders, strict=True)
        ]
        values, rest = to_host(state, self._backend), to_host(rest, self._backend)
        partial = {
            **rest,
            "state": values,
            "param_groups": groups,
            PARTIAL_KEY: True,
            HELD_KEY: local,
            GONE_KEY: sorted(self.groups.gone),
            ORDER_KEY: [name for _, name in sorted(self._known_names().items())],
        }
        return {**partial, SHARD_KEY: self.pieces.ranges()} if is_divided else partial

    def _names_in(self, group: Mapping[str, Any], order: Sequence[int]) -> dict[str, list[str]]:
        """The names that torch keeps of a group's parameters, if they were given with names."""
        names = [self._param_names[position] for position in order if position in self._param_names]
        return {"param_names": names} if "param_names" in group and len(names) == len(order) else {}

    def check_groups(self, state_dict: Mapping[str, Any]) -> None:
        """Checks that a state dict has these param groups.

        Raises:
            ValueError: it has others.
        """
        sizes = [len(group["params"]) for group in state_dict.get("param_groups", ())]
        if "param_groups" in state_dict and sizes != self.group_sizes:
            raise ValueError(
                f"the optimizer state has param groups of sizes {sizes}, and this optimizer of "
                f"sizes {self.group_sizes}; build the optimizer as it was when the state was saved."
            )

    def load_settings(self, state_dict: Mapping[str, Any]) -> None:
        """Param groups take what a state dict sets, while its state waits for partitioning."""
        groups = self.optimizer.param_groups
        for group, given in zip(groups, state_dict.get("param_groups", ()), strict=False):
            group.update(copy.deepcopy(_settings(given)))

    def with_settings(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict that waited, with settings and groups that scripts have given since."""
        if "param_groups" not in state_dict:
            return dict(state_dict)
        groups, first = [], 0
        for group, size in zip(self.optimizer.param_groups, self.group_sizes, strict=True):
            groups.append({**_settings(group), "params": list(range(first, first + size))})
            first += size
        kept = [{k: g[k] for k in ("param_names",) if k in g} for g in state_dict["param_groups"]]
        return {
            **state_dict,
            "param_groups": [{**a, **b} for a, b in zip_longest(groups, kept, fillvalue={})],
        }

    def show(self, waiting: Mapping[str, Any]) -> None:
        """Puts a full state dict that waits for partitioning where scripts find it."""
        state = self.optimizer.state
        for number, parameter in enumerate(parameters_of(self.optimizer)):
            state.pop(parameter, None)
            if number in waiting.get("state", ()):
                state[parameter] = copy.copy(waiting["state"][number])

    def take_back(self, waiting: Mapping[str, Any]) -> dict[str, Any]:
        """The dict that was shown, with state as scripts have left it."""
        if "state" not in waiting:  # of an optimizer that has a form of its own
            return dict(waiting)
        entries = {k: v for k, v in waiting["state"].items() if not isinstance(k, int)}
        for number, parameter in enumerate(parameters_of(self.optimizer)):
            if parameter in self.optimizer.state:
                entries[number] = self.optimizer.state.pop(parameter)
        return {**waiting, "state": entries}

    def load(self, full: Mapping[str, Any]) -> None:
        """Loads this rank's part of a full state dict. After partitioning.

        Of parameters that are split, it may have this rank's parts.
        """
        if HELD_KEY not in full:  # the partial state of a replica counts by position
            full = self.groups.by_position(full)
        full = {**full, "state": self._taken(full["state"])}
        masters = {
            position: entry[MASTER_KEY]
            for position, entry in full["state"].items()
            if isinstance(entry, Mapping) and MASTER_KEY in entry
        }
        self._load_masters(masters.get)
        self._load_picked(self.pieces.cut(full))

    def _taken(self, state: Mapping[int, Any]) -> dict[int, Any]:
        """The state with this rank's parts in the place of whole tensors."""
        found = dict(state)
        for position, shard in self.shards().items():
            if isinstance(found.get(position), Mapping):
                found[position] = mapped(functools.partial(_part_of, shard), found[position])
        return found

    def with_whole_tensors(
        self, state: Mapping[int, Any], gather: Callable[[Any], Sequence[Any]]
    ) -> dict[int, Any]:
        """A state of this rank's parts with those of all ranks put together. Collective.

        `gather` brings the values of all ranks that share tensors, in order.
        """
        shards = self.shards()
        own = {
            position: {
                key: value
                for key, value in flattened(state[position]).items()
                if isinstance(value, torch.Tensor) and tuple(value.shape) == shard.shape
            }
            for position, shard in shards.items()
            if isinstance(state.get(position), Mapping)
        }
        everyone, found = gather(own), dict(state)
        for position, entry in own.items():
            join = shards[position].join
            whole = {key: join([other[position][key] for other in everyone]) for key in entry}
            found[position] = restored({**flattened(state[position]), **whole})
        return found

    def _load_picked(self, full: Mapping[str, Any]) -> None:
        """Loads the states of what this rank updates, which are cut as it is."""
        kept = [[self.positions[id(p)] for p in g["params"]] for g in self.optimizer.param_groups]
        picked = pick_optimizer_state(full, kept)
        picked["state"] = {
            number: {k: v for k, v in entry.items() if k != MASTER_KEY}
            if isinstance(entry, Mapping)
            else entry
            for number, entry in picked["state"].items()
        }
        rest = {k: v for k, v in full.items() if k not in ("state", "param_groups")}
        self.optimizer.load_state_dict({**rest, **picked})
        self.groups.remember()

    def _load_masters(self, find: Callable[[int], torch.Tensor | None]) -> None:
        """Masters take values that were saved, see `ParameterStore.load_masters`.

        Whole masters are found by the positions of their parameters.
        """
        for model in self.models:
            values = {
                name: value
                for name, parameter in model.store.state.local_parameters()
                if id(parameter) in self.positions
                and (value := find(self.positions[id(parameter)])) is not None
            }
            model.store.load_masters(values)

    # --- by name --------------------------------------------------------------------------------

    def _names(self) -> dict[int, str]:
        """Position of a parameter -> its name in the model; of several, with their labels."""
        found = self._known_names().items()
        return {place: name or f"parameter {place} of the optimizer" for place, name in found}

    def name_of(self, parameter: nn.Parameter) -> str:
        """A parameter's name in the model, or what stands for it."""
        return self._names()[self.positions[id(parameter)]]

    def is_elsewhere(self, parameter: nn.Parameter) -> bool:
        """Whether another rank has a parameter of the plain optimizer."""
        return id(parameter) in self.elsewhere and parameter.is_meta

    def _known_names(self) -> dict[int, str | None]:
        """Position -> name, or None if no model has the parameter."""
        names: dict[int, str] = {}
        for model in self.models:
            prefix = f"{model.label}." if len(self.models) > 1 and model.label else ""
            names |= {id(p): f"{prefix}{n}" for n, p in model.module.named_parameters()}
        found: dict[int, str | None] = {}
        for ident, position in self.positions.items():  # copies come after their parameters
            found.setdefault(position, names.get(ident))
        return found

    def origins(self) -> dict[int, Origin]:
        """Id of everything in the groups -> where its elements are in the model."""
        names, ranges = self._names(), self.pieces.ranges()
        places = {id(p): self.positions[id(p)] for p in parameters_of(self.optimizer)}
        return {
            ident: Origin(names[place], ranges[place][0][0] if place in ranges else 0)
            for ident, place in places.items()
        }

    def with_numbers(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict with what belongs to the whole optimizer."""
        return {**state, **{name: held.state_dict() for name, held in self._numbers.items()}}

    def without_numbers(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict as torch's."""
        return {key: value for key, value in state.items() if key not in _NUMBERS}

    def load_numbers(self, state: Mapping[str, Any]) -> None:
        """Takes what `with_numbers` added, if it is there."""
        for name, held in self._numbers.items():
            if name in state:
                held.load_state_dict(state[name])

    def shards(self) -> dict[int, Shard]:
        """Position of a parameter that is split over ranks -> the part that this rank has."""
        of_ids = {
            id(parameter): model.shards_of_tensors[name]
            for model in self.models
            for name, parameter in model.store.state.parameters.items()
            if name in model.shards_of_tensors
        }
        found = ((position, of_ids.get(i)) for i, position in self.positions.items())
        return {position: shard for position, shard in found if shard is not None}

    def _range_of(self, parameter: nn.Parameter) -> tuple[int, int, tuple[int, ...]] | None:
        """(start, stop, shape of the whole) of a piece of a parameter; None for a whole one."""
        found = self.pieces.ranges().get(self.positions[id(parameter)])
        return None if found is None else (*found[0], found[1])

    def entries(self) -> Iterator[StatePiece]:
        """State that this rank holds, by parameter name. Values are not copied."""
        self.pieces.renew()
        names, shards = self._names(), self.shards()
        inner, _, _ = self._inner()
        for number, parameter in enumerate(parameters_of(self.optimizer)):
            position, part = self.positions[id(parameter)], self._range_of(parameter)
            name, shard = names[position], shards.get(position)
            state = flattened(inner.get(number, {}))
            if self.pieces.is_wide(parameter):
                state[MASTER_KEY] = parameter
            for key, value in state.items():
                is_tensor = isinstance(value, torch.Tensor)
                if part is not None and is_tensor and value.shape == parameter.shape:
                    yield StatePiece(name, key, value, part[2], part[0], shard)
                elif is_tensor and value.shape == parameter.shape:
                    yield StatePiece(name, key, value, shard=shard)
                else:
                    yield StatePiece(name, key, value)

    def load_entries(self, saved: "ShardReader", saved_names: Mapping[str, str]) -> None:
        """Loads the state of this rank's parameters from a checkpoint. After partitioning.

        `saved_names` has the name under which a parameter was saved, where that is another one.
        """
        index, shards, kind = saved.index, self.shards(), "optimizer"
        names = {at: saved_names.get(name, name) for at, name in self._names().items()}

        def master_of(position: int) -> torch.Tensor | None:
            name = names[position]
            if MASTER_KEY not in index.keys(kind, name):
                return None
            return saved.whole(kind, name, MASTER_KEY, shards.get(position))

        self._load_masters(master_of)
        state = state_of_no_parameter(self.optimizer)
        for parameter in parameters_of(self.optimizer):
            position = self.positions[id(parameter)]
            name, part = names[position], self._range_of(parameter)
            entry: dict[str, Any] = {}
            for key in index.keys(kind, name):
                if key == MASTER_KEY:
                    continue
                shape, shard = index.shape(kind, name, key), shards.get(position)
                if shard is not None and shape == shard.whole:
                    shape = shard.shape
                else:
                    shard = None  # a number of steps
                if part is not None and shape == part[2]:
                    entry[key] = saved.flat(kind, name, key, part[0], part[1] - part[0], shard)
                else:
                    entry[key] = saved.whole(kind, name, key, shard)
            entry.update(index.numbers.get(name, {}))
            if entry:
                state[position] = restored(entry)
        # Without names of parameters: these groups do not count over all parameters as names do.
        groups = [
            {k: v for k, v in group.items() if k != "param_names"}
            for group in self.optimizer.param_groups
        ]
        self._load_picked({**self._saved_rest, "state": state, "param_groups": groups})
        self._saved_rest = {}

    def group_settings(self) -> list[dict[str, Any]]:
        """Settings of every param group, with the names of its parameters under "params"."""
        self.groups.notice()
        self.groups.remember()
        names = self._names()
        settings = [
            to_host({k: v for k, v in group.items() if k not in _OF_RANK}, self._backend)
            | {"params": [names[position] for position in order]}
            for group, order in zip(self.optimizer.param_groups, self.groups.orders, strict=True)
        ]
        settings[0].update({f"{_PREFIX}{k}": v.state_dict() for k, v in self._numbers.items()})
        if kept := state_of_no_parameter(self.optimizer):
            settings[0][_STATE] = to_host(kept, self._backend)
        if rest := self._inner()[2]:
            settings[0][_REST] = to_host(rest, self._backend)
        return settings

    def load_group_settings(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the settings (learning rates and such) of groups of the same parameters.

        Raises:
            CheckpointError: the groups hold other parameters.
        """
        own = self.group_settings()
        for number, (mine, other) in enumerate(zip_longest(own, saved, fillvalue={"params": []})):
            different = sorted(set(mine["params"]) ^ set(other["params"]))
            if different:
                raise CheckpointError(
                    f"param group {number} of this optimizer and of the saved one differ in "
                    f"{', '.join(different[:5])}{', ...' if len(different) > 5 else ''}. Build the "
                    f"optimizer as it was, or pass load_optimizer=False."
                )
        for group, other in zip(self.optimizer.param_groups, saved, strict=True):
            own_keys = (k for k in other if k not in _OF_RANK and not k.startswith(_PREFIX))
            group.update({k: other[k] for k in own_keys})
        first = saved[0] if saved else {}
        self.optimizer.state.update(first.get(_STATE, {}))
        self._saved_rest = first.get(_REST, {})
        for name, numbers in self._numbers.items():
            if f"{_PREFIX}{name}" in first:
                numbers.load_state_dict(first[f"{_PREFIX}{name}"])


def _part_of(shard: Shard, value: Any) -> Any:
    """This rank's part of a whole tensor; other values as they are."""
    is_whole = isinstance(value, torch.Tensor) and tuple(value.shape) == shard.whole
    return shard.take(value) if is_whole else value


def _is_plain(value: Any) -> bool:
    """Whether it is the same on all ranks of a pipeline: numbers and texts, also in containers."""
    if isinstance(value, (Mapping, list, tuple)):
        parts = list(value.values() if isinstance(value, Mapping) else value)
        return bool(parts) and all(map(_is_plain, parts))
    return value is None or isinstance(value, (bool, int, float, str))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
