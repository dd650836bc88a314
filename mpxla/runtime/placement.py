"""Where the parameters and buffers of all models live, from the first step that reads them on.

The partitioner decides for a step; what it does not read is placed here. This module must not know
how a step is captured, cut or run.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mpxla.errors import StepError
from mpxla.graph.partition.twins import Path, find_twins
from mpxla.graph.split import trained_by
from mpxla.graph.stepgraph import StepGraph
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.plans.cut import CutStep
from mpxla.runtime.plans.partition_store import cut_settings
from mpxla.runtime.reduction import Reducers
from mpxla.runtime.states import ModelStates
from mpxla.session import Session

__all__ = ["Placement"]


class Placement:
    """Pipeline ranks of every parameter and buffer, and the moves that it takes.

    Attributes:
        ranks: of everything that is placed, or that a checkpoint has placed before.
        stateful: buffers that steps change: later partitions keep those where they are.
    """

    def __init__(
        self, session: Session, states: ModelStates, link: PipelineLink, reducers: Reducers
    ):
        self._config = session.config
        self._backend = session.backend
        self._pp_rank = session.topology.pp_rank(session.rank)
        self._states = states
        self._link = link
        self._reducers = reducers
        self._of_model: dict[str, dict[str, tuple[int, ...]]] = {}
        self._holders: dict[str, tuple[int, ...]] = {}
        self.ranks: dict[str, tuple[int, ...]] = {}
        self.stateful: frozenset[str] = frozenset()
        self._used: set[str] = set()

    def unsettled(self, labels: Iterable[str]) -> list[str]:
        """What some models have and is not placed: all of it, or what they have since then."""
        return [
            name
            for label in labels
            for name, own in self._states.names_of(label).items()
            if own not in self._of_model.get(label, ()) and self._states.tensor(name) is not None
        ]

    def is_settled(self, label: str) -> bool:
        """Whether all that a model has is placed, also what belongs to another one."""
        is_placed, held = self._states[label].is_placed, self._of_model.get(label, {})
        return is_placed and all(own in held for own in self._states.own_names(label))

    def note_holders(self, name: str, ranks: tuple[int, ...]) -> None:
        """Remembers which ranks of the pipeline have values of what is not placed; others lack."""
        self._holders[name] = ranks

    def of_new(self, cut: CutStep, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Ranks of parameters and buffers that are not placed, of models that a step uses.

        What the step does not read lives where a checkpoint says it did, or with the rest of its
        module (an evaluation step reads batch norm's statistics and not its counter), or on rank 0.
        """
        ranks = cut.parameter_ranks()
        of_module = {name.rpartition(".")[0]: held for name, held in reversed(ranks.items())}
        return {
            name: ranks.get(name)
            or self.ranks.get(name)
            or of_module.get(name.rpartition(".")[0], (0,))
            for name in names
        }

    def twins(self, step: StepGraph) -> dict[str, str]:
        """What copies of trained modules hold, of any model, with what their originals do.

        A module is trained if the step trains it, or if its copy is frozen and it is not. There are
        none where the user places modules.
        """
        if not self._config.auto_partition or self._config.pipeline_parallel_degree == 1:
            return {}
        names: dict[Path, str] = {}
        held: dict[Path, torch.Tensor] = {}
        for label in self._states.labels:
            for name, own in self._states.names_of(label).items():
                tensor = self._states.tensor(name)
                if tensor is not None:
                    path = (self._states.path(label), *own.split("."))
                    names[path], held[path] = name, tensor
        kinds = {path: (tensor.shape, tensor.dtype) for path, tensor in held.items()}
        trained = trained_by(step)
        found = find_twins(kinds, {path for path, name in names.items() if name in trained})
        wanting = {path for path, tensor in held.items() if tensor.requires_grad}
        found = {**find_twins(kinds, wanting - found.keys()), **found}
        return {names[copied]: names[original] for copied, original in found.items()}

    def with_twins(self, twins: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
        """The ranks of what is placed, and of what lives beside it from now on."""
        ranks = dict(self.ranks)
        for copied, original in twins.items():
            if copied in self.ranks or original in self.ranks:
                ranks.setdefault(original, self.ranks.get(copied, ()))
                ranks.setdefault(copied, ranks[original])
        return ranks

    def settle(self, label: str, ranks: Mapping[str, tuple[int, ...]]) -> None:
        """Moves a model to its ranks, with equal values over replicas. All ranks call it.

        What is placed already stays.
        """
        self.ranks.update(ranks)
        held = self._of_model.setdefault(label, {})
        own = self._states.to_own_names(label, self.ranks)
        new = {name: where for name, where in own.items() if name not in held}
        held.update(new)
        state = self._states[label]
        self._backend.forget(state.parameters.values())
        for name in sorted(self._holders.keys() & self._states.names_of(label)):
            self._bring(name, self._holders.pop(name))
        state.place({n for n, r in new.items() if self._pp_rank in r}, self._backend.device)
        self._reducers.equalize(label, held, list(new))

    def _bring(self, name: str, holders: tuple[int, ...]) -> None:
        """Sends a tensor that is to be placed to ranks that need it and have no values of it."""
        lacking = [rank for rank in self.ranks[name] if rank not in holders]
        tensor = self._states.tensor(name)
        assert tensor is not None, "it is there"
        for value in self._link.hand_over(holders[0], lacking, [tensor.detach()]) or ():
            label, own = self._states.own_name(name)
            self._states[label].give(own, self._backend.view(value).clone())

    def decision(self, label: str) -> dict[str, Any]:
        """Where a model lives, as plain data, and the settings that led there."""
        own, names = self._states.to_own_names(label, self.ranks), self._states[label].names_now
        return {
            "parameter_ranks": {names[n]: list(held) for n, held in own.items() if n in names},
            "settings": cut_settings(self._config),
        }

    def follow_decision(self, label: str, decision: Mapping[str, Any]) -> None:
        """Makes the first cut put a model where it was; on all ranks, before its first step.

        Without effect under other settings. Names of another model are passed over.
        """
        if decision["settings"] != cut_settings(self._config):
            return
        own = {name: tuple(held) for name, held in decision["parameter_ranks"].items()}
        names = self._states.names_of(label)
        others = {name: held for name, held in self.ranks.items() if name not in names}
        self.ranks = {**self._states.from_own_names(label, own), **others}

    def unread(self, cut: CutStep) -> list[str]:
        """Placed buffers that a step changes and that no step has used so far.

        They are with the rest of their module, or on rank 0, and may still move.
        """
        if self._config.pipeline_parallel_degree == 1:
            return []
        owners = {name: self._states.own_name(name) for name in _changed(cut) - self._used}
        return sorted(
            name
            for name, (label, own) in owners.items()
            if own in self._of_model.get(label, ()) and own in self._states[label].buffers
        )

    def move(self, ranks: Mapping[str, tuple[int, ...]]) -> None:
        """Brings placed buffers to other pipeline ranks. All ranks of a pipeline call it."""
        for name, where in sorted(ranks.items()):
            holders = self.ranks[name]
            self._copy(name, [rank for rank in where if rank not in holders])
            if self._pp_rank in holders and self._pp_rank not in where:
                self._states.leave_buffer(name)
            self._set_ranks(name, where)

    def provide_missing(self, cut: CutStep) -> None:
        """Copies buffers to ranks that read them in this step and did not in earlier ones."""
        for name, ranks in sorted(cut.parameter_ranks().items()):
            holders = self.ranks[name]
            new = [rank for rank in ranks if rank not in holders]
            if new:
                self._copy(name, new)
                self._set_ranks(name, tuple(sorted((*holders, *new))))

    def _copy(self, name: str, new: Sequence[int]) -> None:
        """Sends a buffer to more pipeline ranks."""
        label, own = self._states.own_name(name)
        assert own in self._states[label].buffers, "the partitioner keeps parameters in place"
        value = self._states[label].buffers[own]
        received = self._link.hand_over(self.ranks[name][0], new, [value])
        for copy in self._backend.publish(received) if received else ():
            self._states.adopt_buffer(name, copy)

    def _set_ranks(self, name: str, ranks: tuple[int, ...]) -> None:
        self.ranks[name] = ranks
        for placed, held in self._of_model.items():
            held.update(self._states.to_own_names(placed, {name: ranks}))

    def note_changes(self, cut: CutStep) -> None:
        """Remembers what steps use, and which buffers and parameters they change.

        Raises:
            StepError: one of them is on several ranks.
        """
        changed = _changed(cut)
        for name in sorted(changed):
            if len(self.ranks[name]) > 1:
                raise StepError(
                    f"this step function changes {name}, which several pipeline ranks "
                    f"{list(self.ranks[name])} hold since an earlier step function. "
                    f"Call the function that changes it (the training step) first."
                )
        self.stateful |= changed
        self._used |= cut.parameter_ranks().keys()


def _changed(cut: CutStep) -> set[str]:
    return {name for stage in cut.stages for name in stage.new_buffers}
