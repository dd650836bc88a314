"""What a model holds on this rank, and its state dict.

The part of `DistributedModel` that is about parameters and buffers by name. It must not know steps,
hooks or optimizers.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import nn

from mpxla.comm.transport import Group
from mpxla.delayed import is_delayed
from mpxla.errors import MpxlaError
from mpxla.nn.layers import make_whole, shards_of
from mpxla.nn.shards import Shard
from mpxla.parallel.state_dicts import (
    PARTIAL_KEY,
    GivenValues,
    gather_full,
    gather_on_first,
    to_host,
)
from mpxla.parallel.summoned import summoned
from mpxla.runtime.state import ModelState, with_versions
from mpxla.session import Session

__all__ = ["NoSuchAttributeError", "PartitionedModule"]

_GATHER = "model.state_dict"


class NoSuchAttributeError(AttributeError):
    """A name that neither a wrapper (of a model or optimizer) nor what it wraps has."""

    def __init__(self, wrapper: Any, name: str, inner: Any):
        super().__init__(name=name, obj=wrapper)
        self._kind = type(wrapper)
        self._inner = type(inner).__name__

    def __str__(self) -> str:
        # Not before somebody reads it: `hasattr` in every step would pay for the search.
        kind = self._kind.__name__
        known = [other for other in dir(self._kind) if not other.startswith("_")]
        near = difflib.get_close_matches(str(self.name), known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"see dir(smp.{kind}) for what there is."
        return (
            f"mpxla's {kind} has no attribute {self.name!r}, nor has the {self._inner} that it "
            f"wraps; {advice}"
        )


class PartitionedModule(nn.Module):
    """A module whose parameters and buffers live on several ranks.

    Shards are of parameters, by canonical name, of which this rank has a part.
    """

    def __init__(
        self, module: nn.Module, session: Session, shards: Mapping[str, Shard] | None = None
    ):
        super().__init__()
        self._session = session
        self._backend = session.backend
        self.module = module
        self._state = ModelState(module)
        self.shards_of_tensors: dict[str, Shard] = dict(shards or {})
        self._awaits_values = False
        self.given = GivenValues()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is not None and hasattr(inner, name):
                raise AttributeError(
                    f"mpxla's {type(self).__name__} has no attribute {name!r}, but the "
                    f"{type(inner).__name__} that it wraps has: write model.module.{name}",
                    name=name,
                    obj=self,
                ) from None
            raise NoSuchAttributeError(self, name, inner) from None

    @property
    def partitioned(self) -> bool:
        """Whether the parameters are on their ranks."""
        return self._state.is_placed

    def get_module(self) -> nn.Module:
        """The user's model."""
        return self.module

    @property
    def canonical_names(self) -> dict[str, str]:
        """Every name of a parameter or buffer -> the one name used for it (tied weights)."""
        return self._state.canonical_names

    # --- tensor parallelism ---------------------------------------------------------------------

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Modules that have a part of their tensors here."""
        return (module for module in self.module.modules() if shards_of(module))

    def is_distributed_parameter(self, param: nn.Parameter) -> bool:
        """Whether this rank has a part of a parameter, and other ranks have the rest."""
        return any(param is self._state.parameters[name] for name in self.shards_of_tensors)

    def is_distributed_buffer(self, buf: torch.Tensor) -> bool:
        """The same of a buffer: never, since buffers stay whole."""
        return False

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Whether a parameter sees the batches of all ranks that share tensors: all of them do."""
        return self._session.topology.tp_size > 1

    def is_scaled_batch_buffer(self, buf: torch.Tensor) -> bool:
        """The same of a buffer."""
        return self._session.topology.tp_size > 1

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of those whose gradients are reduced over `DP_GROUP`."""
        if self._session.topology.tp_size == 1:
            yield from self._named_parameters()

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of those whose gradients are reduced over `RDP_GROUP`."""
        if self._session.topology.tp_size > 1:
            yield from self._named_parameters()

    def _named_parameters(
        self, is_wanted: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """(first name that it has now, parameter) of what the model has, by canonical name."""
        held, names = self._state.parameters, self._state.names_now
        return ((names[n], held[n]) for n in names if n in held and is_wanted(n))

    @property
    def tensors(self) -> ModelState:
        """Parameters and buffers by name."""
        return self._state

    def _require_partition(self, name: str) -> frozenset[str]:
        """Names of the parameters and buffers that this rank holds."""
        if self._state.local_names is None:
            raise MpxlaError(
                f"model.{name} is known after the first call of a step function, which partitions "
                f"the model."
            )
        return self._state.local_names

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of the parameters that this rank holds. After partitioning."""
        self._require_partition("local_named_parameters")
        return self._named_parameters(self._state.holds)

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that this rank holds; may be empty. After partitioning."""
        self._require_partition("local_parameters")
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, buffer) of the buffers that this rank holds. After partitioning."""
        self._require_partition("local_named_buffers")
        state, names = self._state, self._state.names_now
        found = ((n, b) for n, b in state.buffers.items() if n in names and state.holds(n))
        return ((names[n], b) for n, b in found if not state.is_carried(n))

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Buffers that this rank holds. After partitioning."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) of the modules with a parameter or buffer here, and of their parents."""
        self._require_partition("local_named_modules")
        state = self._state
        names = [n for n, canonical in state.canonical_names.items() if state.holds(canonical)]
        owners = {name.rpartition(".")[0] for name in names}
        return (
            (path, module)
            for path, module in self.module.named_modules()
            if any(o == path or o.startswith(f"{path}.") or not path for o in owners)
        )

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules with a parameter or buffer here, and their parents. After partitioning."""
        return (module for _, module in self.local_named_modules())

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's parameters and buffers by name, marked as partial. After partitioning.

        Divided parameters (`sharded_data_parallel_degree`) are whole here; all ranks call it then.
        """
        if not self._state.shards:
            return self._local_values()
        with self.together("model.local_state_dict()", self._session.topology.world_group()):
            return self._local_values()

    def _local_values(self) -> dict[str, Any]:
        """As `local_state_dict`; of divided parameters all ranks of the group call it."""
        self._require_partition("local_state_dict")
        self._state.check_divided()
        names = self._state.canonical_names
        own: Any = self.module.state_dict(keep_vars=True)
        local = {
            name: value
            for name, value in own.items()
            if name not in names or self._state.holds(names[name])
        }
        whole = {
            name: self.joined(names[name]) for name in local if names.get(name) in self._state.parts
        }
        local = {name: value for name, value in local.items() if name not in whole}
        values = {**to_host(local, self._backend), **whole, PARTIAL_KEY: True}
        return with_versions(values, own._metadata)

    def joined(self, name: str) -> torch.Tensor:
        """A divided parameter on the host. All ranks of the sharding group call it."""
        session, shard = self._session, self._state.shards[name]
        group = session.topology.sdp_group(session.rank)
        (own,) = self._backend.get([self._state.parts[name]])
        return shard.join(session.transport.all_gather(shard.padded(own), group).result())

    def state_dict(
        self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any
    ) -> dict[str, Any]:  # type: ignore[override]
        """The plain model's state dict, on the host, gathered over the ranks of the replica.

        All ranks of a replica must call it (usually those with `dp_rank() == 0`; with tensor
        parallelism those with `rdp_rank() == 0`; with `sharded_data_parallel_degree`, all ranks).

        Args:
            *args: not supported; for the signature of `torch.nn.Module`.
            gather_to_rank0: only global rank 0 gets content, others get `{}`.
            **kwargs: not supported; for the signature of `torch.nn.Module`.

        Raises:
            MpxlaError: unsupported arguments.
        """
        if args or kwargs:
            raise MpxlaError("DistributedModel.state_dict takes gather_to_rank0 only.")
        own: Any = self.module.state_dict(keep_vars=True)
        if self._state.is_lent:
            values = {} if gather_to_rank0 and self._session.rank else own
            return with_versions(to_host(values, self._backend), own._metadata)
        if not self.partitioned:
            self.check_values("model.state_dict", own)
            values = self.with_whole_tensors(to_host(own, self._backend))
            return with_versions(self.given.note(values), own._metadata)
        session = self._session
        group = session.topology.pp_group(session.rank)
        on_first = gather_to_rank0 and not self.shards_of_tensors
        gather = gather_on_first if on_first else gather_full
        together = session.topology.world_group() if self._state.shards else group
        with self.together("model.state_dict()", together), session.gathering(_GATHER, group):
            full = gather(session.state_objects, group, self._local_values(), list(own))
        full = self.with_whole_tensors(full)
        # Names of one tensor share it, as in torch: those who save files write it once.
        names, first = self._state.canonical_names, self._state.names_now
        full = {name: full.get(first.get(names.get(name, ""), name), v) for name, v in full.items()}
        if gather_to_rank0 and session.rank:
            return {}
        return with_versions(self.given.note(full), own._metadata)

    def check_values(self, what: str, own: Mapping[str, Any]) -> None:
        """Checks that a model that is not partitioned has values of its tensors, for a call `what`.

        Raises:
            MpxlaError: it has not.
        """
        if self._awaits_values:
            raise MpxlaError(
                f"{what} was called before the first step, in which the values of the checkpoint "
                f"are loaded; call it after a step (one without model.backward will do)."
            )
        tensors = {n: v for n, v in own.items() if isinstance(v, torch.Tensor)}
        delayed = [name for name, value in tensors.items() if is_delayed(value)]
        shared = [n for n, v in tensors.items() if v.is_meta and n not in delayed]
        if shared:
            raise MpxlaError(
                f"{what} was called before the first step of this model, and {shared[0]}, which it "
                f"shares with another one, is on its rank already; call it after the first step "
                f"that uses this model."
            )
        if delayed:
            raise MpxlaError(
                f"{what} was called before the first step, and {delayed[0]} has no values yet "
                f"(smp.delay_param_initialization); call it after the first step."
            )

    def with_whole_tensors(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values with split parameters put together. All ranks of the group call it."""
        if not self.shards_of_tensors:
            return values
        session, names = self._session, self._state.canonical_names
        group = session.topology.tp_group(session.rank)
        split = {n: v for n, v in values.items() if names.get(n, n) in self.shards_of_tensors}
        whole: dict[str, torch.Tensor] = {}
        parts = session.state_objects.allgather(split, group)
        for name in split:
            shard = self.shards_of_tensors[names.get(name, name)]
            whole[name] = shard.join([part[name] for part in parts])
        return {**values, **whole}

    def summon_full_params(self, writeback: bool = True) -> AbstractContextManager[nn.Module]:
        """Gives the user's module whole parameters and buffers, on the host of every rank.

            with model.summon_full_params() as module:
                module.generate(ids)
                module.head.weight.data.clamp_(-1, 1)  # alike on all ranks

        All ranks of the job enter and leave the block together, between steps. In it the module is
        a plain one, which can be called, copied, saved and changed, on the memory of the whole
        model. Its parameters are other objects than outside: take them from the module, in the
        block. Steps, updates and loading come after it.

        Args:
            writeback: what the block writes goes to the model's own tensors. (Otherwise it is
                dropped, and nothing is compared between ranks.)

        Raises:
            StepError: a parameter has a gradient at the end of the block.
            RankMismatch: ranks have written other values.
            MpxlaError: the model has no values yet, before the first step.
        """
        return summoned(self, self._session, writeback)

    def together(self, what: str, ranks: Group) -> AbstractContextManager[None]:
        """Around a call of the user that several ranks make together. See `DistributedModel`."""
        raise NotImplementedError

    def cpu(self) -> Self:
        """Gathers all parameters and buffers on every rank and moves them to the host.

        All ranks of a replica must call it (with `sharded_data_parallel_degree`, all ranks);
        training cannot go on afterwards.
        """
        full = self.state_dict()
        self._backend.forget(self.parameters())
        self._state.gather_on_host(full)
        self.shards_of_tensors.clear()
        make_whole(self.module)
        return self
