"""Parameters and buffers of all models of a session, under names that no two of them share.

Step functions may use several models, so plans, stages and messages name tensors of all of them.
The first model's tensors keep the names that they have in it; those of the second and of later ones
stand behind a label: `model_2.head.weight`. A tensor that several models share (the encoder of an
actor and a critic) belongs to the first of them, and the others know it by the name that it has
there. This module must not know graphs or schedules.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from mpxla.comm.packing import describe
from mpxla.graph.capture.aliases import Aliases
from mpxla.graph.capture.own_parameters import Former
from mpxla.graph.partition.modules import joined_path
from mpxla.runtime.state import ModelState
from mpxla.stage.flat import FlatShard

__all__ = ["Member", "ModelStates"]


@dataclass(frozen=True)
class Member:
    """One of the models that step functions may use, as the engine knows it.

    Attributes:
        state: its parameters and buffers.
        pins: given where its module is, module path -> pipeline rank at the time of partitioning.
        on_placed: called once its parameters are on their ranks.
        measures_times: whether operators are timed before a step that uses it is partitioned.
        before_new: called before parameters and buffers are taken in that it has got later.
        split: parameters and buffers of which each rank of a tensor-parallel group has a part,
            by name, with the place of the part (see `Shard.place`).
    """

    state: ModelState
    pins: Callable[[str], Mapping[str, int]]
    on_placed: Callable[[], None]
    measures_times: bool = False
    before_new: Callable[[], None] = lambda: None
    split: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class ModelStates:
    """The `ModelState` of every model, by the model's label (empty for the first one).

    Attributes:
        aliases: tensors of the script that are buffers of the models.
    """

    def __init__(self) -> None:
        self._states: dict[str, ModelState] = {}
        self._owners: dict[str, tuple[str, str]] = {}
        self._names: dict[str, dict[str, str]] = {}
        self._holders: dict[str, list[tuple[ModelState, str]]] = {}
        self._module: nn.Module | None = None
        self.aliases = Aliases()

    def add(self, state: ModelState) -> str:
        """Takes in a model; returns its label."""
        label = self._free_label()
        self._states[label], self._names[label] = state, {}
        self._take_in(label)
        self._module = None
        return label

    def take_in(self) -> None:
        """Names what models have now and had not before."""
        for label, state in self._states.items():
            state.take_in()
            self._take_in(label)

    def _take_in(self, label: str) -> None:
        state, names, known = self._states[label], self._names[label], self._tensors()
        for own, tensor in (*state.parameters.items(), *state.buffers.items()):
            if own not in names:
                self._name(label, own, known.get(id(tensor), joined_path(label, own)))
        for own in state.buffer_names:  # also of places that have none yet
            if own not in names:
                self._name(label, own, joined_path(label, own))
        for one, other in ((names[a], names[b]) for a, b in state.sharing):
            self.aliases.parts |= {one: f"the buffer {other}", other: f"the buffer {one}"}

    def _name(self, label: str, own: str, name: str) -> None:
        self._names[label][own] = name
        self._owners.setdefault(name, (label, own))
        self._holders.setdefault(name, []).append((self._states[label], own))

    def _tensors(self) -> dict[int, str]:
        """Identity of every tensor -> its name here."""
        return {
            id(tensor): self._names[label][own]
            for label, state in self._states.items()
            for own, tensor in (*state.parameters.items(), *state.buffers.items())
            if own in self._names[label]
        }

    def _free_label(self) -> str:
        if not self._states:
            return ""
        label = f"model_{len(self._states) + 1}"
        while any(name.startswith(f"{label}.") for name in self._owners):
            label += "_"  # the first model has a module of that name
        return label

    @property
    def labels(self) -> tuple[str, ...]:
        """Of all models, in the order in which they were made."""
        return tuple(self._states)

    def __getitem__(self, label: str) -> ModelState:
        return self._states[label]

    @property
    def module(self) -> nn.Module:
        """One module with everything in it: the only model, or a container of all."""
        if self._module is None:
            modules = {self.path(label): state.module for label, state in self._states.items()}
            self._module = nn.ModuleDict(modules) if len(modules) > 1 else modules[""]
        return self._module

    def path(self, label: str) -> str:
        """Where a model is in `module`; empty if it is all of it."""
        if label or len(self._states) == 1:
            return label
        return "model_1"

    def current_names(self) -> dict[str, str]:
        """Every name that a tensor has in `module` now -> its one name here."""
        self.take_in()
        return {
            joined_path(self.path(label), name): self._names[label][canonical]
            for label, state in self._states.items()
            for name, canonical in state.canonical_names.items()
        }

    # --- names ----------------------------------------------------------------------------------

    def former(self) -> Former:
        """See `ModelState.former`, of all models."""
        return {where: t for state in self._states.values() for where, t in state.former().items()}

    def owners(self, names: Iterable[str]) -> set[str]:
        """Labels of the models that have some tensors."""
        return {self._owners[name][0] for name in names}

    def names_of(self, label: str) -> dict[str, str]:
        """The name here of each tensor that belongs to a model -> its name in that model."""
        return {
            name: own for own, name in self._names[label].items() if self._owners[name][0] == label
        }

    def own_names(self, label: str) -> list[str]:
        """Names in a model of all that it has, also of what belongs to another one."""
        return list(self._names[label])

    def closure(self, labels: Iterable[str]) -> list[str]:
        """Some models and those that own what they share, in the order in which they were made."""
        wanted = {owner for label in labels for owner in self.owners(self._names[label].values())}
        return [label for label in self._states if label in wanted or label in set(labels)]

    def own_name(self, name: str) -> tuple[str, str]:
        """(label of the model, name in that model) of a tensor."""
        return self._owners[name]

    def describe(self, names: Iterable[str]) -> list[str]:
        """A line for each of some tensors; equal on two ranks that have the same."""
        tensors = ((name, self.tensor(name)) for name in names)
        return [f"{name}: {describe([t])}" for name, t in tensors if t is not None]

    # --- tensors --------------------------------------------------------------------------------

    def tensor(self, name: str) -> torch.Tensor | None:
        """A parameter or buffer; None for a buffer that was deleted."""
        label, own = self._owners[name]
        state = self._states[label]
        return state.parameters[own] if own in state.parameters else state.buffer(own)

    def is_any_placed(self) -> bool:
        """Whether some model's parameters are on their ranks."""
        return any(state.is_placed for state in self._states.values())

    @property
    def shards(self) -> dict[str, FlatShard]:
        """Of parameters that sharding groups divide."""
        return self._by_name(lambda state: state.shards)

    @property
    def gradient_shards(self) -> dict[str, FlatShard]:
        """Of gradients that sharding groups divide."""
        return self._by_name(lambda state: state.gradient_shards)

    def _by_name(self, of: Callable[[ModelState], dict[str, FlatShard]]) -> dict[str, FlatShard]:
        found = ((self._names[m], of(state).items()) for m, state in self._states.items())
        return {names[own]: shard for names, shards in found for own, shard in shards}

    def local_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank has of parameters and buffers, of all models that are placed."""
        for label, state in self._states.items():
            local, names = state.local_names, self._names[label]
            if local is None:
                continue
            for name, _ in state.local_parameters():
                yield names[name], state.held(name)
            for name, buffer in state.buffers.items():
                if name in local:
                    yield names[name], buffer

    def set_flags(self, flags: Mapping[str, bool], lent: Container[str]) -> None:
        """Sets `requires_grad` of parameters, wherever their values are.

        But for models that are `lent`, by label, and cannot be trained: the step was a copy's.
        """
        for name, value in flags.items():
            label, own = self._owners[name]
            if label not in lent:
                self._states[label].parameters[own].requires_grad_(value)

    def fix_masks(self) -> list[torch.Tensor]:
        """Makes masks among the buffers constants that every rank has; returns these."""
        return [mask for state in self._states.values() for mask in state.fix_masks()]

    def set_buffer(self, name: str, value: torch.Tensor) -> None:
        """Replaces a buffer in every module that holds it."""
        for state, own in self._holders[name]:
            if state.is_left(own):
                for alias in self.aliases.of(name):
                    alias.copy_(value)
            state.set_buffer(own, value)

    def forget_buffer(self, name: str) -> None:
        """Has no values of a buffer that other ranks hold."""
        for state, own in self._holders[name]:
            state.forget_buffer(own)

    def adopt_buffer(self, name: str, value: torch.Tensor) -> None:
        """Makes this rank one of the holders of a buffer."""
        for state, own in self._holders[name]:
            state.adopt_buffer(own, value)

    def leave_buffer(self, name: str) -> None:
        """Frees a buffer here, which other ranks hold from now on."""
        for state, own in self._holders[name]:
            state.leave_buffer(own)

    def to_own_names(
        self, label: str, values: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """Of what is given by the names here, that of one model, by its own names."""
        return {own: values[name] for own, name in self._names[label].items() if name in values}

    def from_own_names(
        self, label: str, values: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """What is given by one model's own names, by the names here; passes over others'."""
        return {name: values[own] for own, name in self._names[label].items() if own in values}
