"""How values come into a model whose parameters are on several ranks, or will be.

The part of `DistributedModel` that loads state dicts and checkpoints. What has no place yet is
loaded once more when the first step has placed the parameters.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mpxla.delayed import accept_changes, is_delayed
from mpxla.errors import MpxlaError
from mpxla.nn.distribute import check_wholes, without_shards
from mpxla.parallel.contents import PartitionedModule
from mpxla.parallel.replica import check_equal_values
from mpxla.parallel.state_dicts import PARTIAL_KEY, GivenValues, gather_full, to_host
from mpxla.parallel.store import ParameterStore
from mpxla.runtime.state import load_into

__all__ = ["LoadableModule"]


class LoadableModule(PartitionedModule):
    """Takes values."""

    @property
    def store(self) -> ParameterStore:
        """Its parameters on this rank, and what optimizers hold of them."""
        raise NotImplementedError

    def register_post_partition_hook(self, hook: Callable[[Any, Any], None]) -> Any:
        """Registers `hook(model, optimizer)`, run after partitioning. See `DistributedModel`."""
        raise NotImplementedError

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        same_partition_load: bool = False,
        *,
        assign: bool = False,
    ) -> Any:
        """Loads a full state dict, or the partial ones of all ranks of a replica.

        Partial dicts are merged first, so all ranks of the replica must call it with theirs.

        Args:
            state_dict: full, or what `local_state_dict` returned (marked as partial).
            strict: whether missing and unexpected keys are errors.
            same_partition_load: the partial dict is this rank's own of the same partition: no
                merging.
            assign: has to be False, see the error.

        Raises:
            RuntimeError: keys or shapes do not match (as in torch).
            MpxlaError: `assign` is set.
        """
        if assign:
            raise MpxlaError(
                "load_state_dict(assign=True) would make the tensors of the dict the parameters; "
                "those of a smp.DistributedModel live with their stages, and take values. Leave "
                "assign out, or load into the model before smp.DistributedModel wraps it."
            )
        values = {k: v for k, v in state_dict.items() if k != PARTIAL_KEY}
        if PARTIAL_KEY not in state_dict:
            check_wholes(values, self.shards_of_tensors, self.canonical_names)
        values = without_shards(values, self.shards_of_tensors, self.canonical_names)
        if PARTIAL_KEY in state_dict and not (same_partition_load and self.partitioned):
            session = self._session
            group = session.topology.pp_group(session.rank)
            names = self.module.state_dict(keep_vars=True)
            values = to_host(values, self._backend)
            with self.together("model.load_state_dict(partial state)", group):
                values = gather_full(session.state_objects, group, values, names)
        elif PARTIAL_KEY in state_dict:
            strict = False
        return self._load_parts(values, strict, getattr(state_dict, "_metadata", {}))

    def _load_parts(self, values: Mapping[str, Any], strict: bool, versions: Any) -> Any:
        with self._loading():
            return self.load_values(values, strict, versions)

    def load_values(self, values: Mapping[str, Any], strict: bool, versions: Any = None) -> Any:
        """Loads whole values; the ranks that divide some of them call it together, with equal ones.

        Of tensors that are split over ranks, values are this rank's parts. Versions are those of
        the modules that gave the values, see `load_into`.

        Raises:
            RankMismatch: ranks have different values of what they divide.
        """
        self._state.check_own()
        self.check_loaded(values)
        self.given = GivenValues()
        self._backend.forget(self.module.parameters())  # torch may swap them
        try:
            result = load_into(self.module, values, strict, versions)
        finally:
            accept_changes()
        self.store.load_beside(values)
        self._state.forget_writes()
        is_later = self._awaits_values or any(is_delayed(p) for p in self.module.parameters())
        if not self.partitioned and is_later:
            self.register_post_partition_hook(
                lambda model, _: model._load_parts(values, False, versions)
            )
        self._backend.flush()
        return result

    def load_when_placed(
        self, load: Callable[[], None], load_beside: Callable[[], None] = lambda: None
    ) -> None:
        """Lets a checkpoint load the model's values, and then what optimizers hold of them.

        Values load now where this rank has any to be replaced, for they may be read, copied and
        written before the first step; what is beside them when every rank has its parameters.
        """
        values = self.module.state_dict(keep_vars=True).values()
        self._awaits_values = not self.partitioned and any(
            isinstance(value, torch.Tensor) and value.is_meta for value in values
        )
        if not self._awaits_values:
            load()
        if self.partitioned:
            load_beside()
            return

        def load_rest(model: Any, optimizer: Any) -> None:
            if self._awaits_values:
                load()
            load_beside()

        self.register_post_partition_hook(load_rest)

    def _loading(self) -> AbstractContextManager[None]:
        """Around a call of the user that loads values: all ranks make it, if some are divided."""
        if not (self._state.shards and self._state.is_placed):
            return nullcontext()
        return self.together("model.load_state_dict()", self._session.topology.world_group())

    def check_loaded(self, values: Mapping[str, Any]) -> None:
        """Checks that ranks load the same parameters, if they divide some of them.

        Raises:
            RankMismatch: they do not.
        """
        session, names = self._session, self._state.canonical_names
        if not any(names.get(name) in self._state.parts for name in values):
            return
        given = {
            name: value
            for name, value in values.items()
            if names.get(name) in self._state.parameters
            and isinstance(value, torch.Tensor)
            and not value.is_meta
        }
        group = session.topology.rdp_group(session.rank)
        check_equal_values(session.state_objects, group, given)
