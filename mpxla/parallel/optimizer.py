"""`DistributedOptimizer`: the user's optimizer, restricted to this rank's parameters.

Parameters keep their identity when the model is partitioned, so param groups, optimizer state and
LR schedulers stay as they are; what other ranks own is taken out of the groups.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from mpxla.checkpoint.single import load, save
from mpxla.errors import CheckpointError, MpxlaError, StepError
from mpxla.graph.capture import current_recorder
from mpxla.graph.user_code import at_user_line
from mpxla.log import warn_once
from mpxla.nn.refusals import refuse_with_shards
from mpxla.parallel.carrier import Carrier, equalize_beside
from mpxla.parallel.companions import Heir, follow_parameters, tensors_beside
from mpxla.parallel.elementwise import check_elementwise, is_elementwise, mixes_parameters
from mpxla.parallel.model import DistributedModel
from mpxla.parallel.models import Models
from mpxla.parallel.names import no_such_attribute
from mpxla.parallel.pieces import SHARD_KEY, OptimizerPieces, join_shards
from mpxla.parallel.state_dicts import (
    HELD_KEY,
    PARTIAL_KEY,
    SavedState,
    StatePiece,
    merge_optimizer_states,
    pick_optimizer_state,
    to_host,
)
from mpxla.parallel.update import CompiledUpdate
from mpxla.session import current

__all__ = ["DistributedOptimizer"]


_MISSING = {
    **dict.fromkeys(("clip_master_grads", "overflow", "loss_scale"), "fp16 training"),
    "_global_grad_norm": "sharded data parallelism",
}
"""Attribute of SMP's wrapper -> the missing feature that it belongs to."""
_OF_RANK = ("params", "param_names")
"""Keys of a param group that are about this rank's parameters."""
_PLAIN = (bool, int, float, str)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a `torch.optim` optimizer for the distributed model whose parameters it holds.

    It may hold parameters of several models. Build the inner optimizer from the raw model's
    parameters before wrapping, or from `DistributedModel.parameters()`. The wrapper shares
    `param_groups`, `state` and `defaults` with it, so that LR schedulers work on either. (SMP API
    reference, "DistributedOptimizer".)

    Args:
        optimizer: the optimizer to wrap.
        static_loss_scale: loss scale of fp16 training, without which it has no effect.
        dynamic_loss_scale: dynamic loss scaling of fp16 training, likewise.
        **dynamic_loss_args: settings of dynamic loss scaling.

    Raises:
        MpxlaError: there is no `DistributedModel` yet, it is not a torch optimizer, or it holds
            parameters of none of several models.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: Any,
    ):
        session = current()
        if session.models is None:
            raise MpxlaError(
                "smp.DistributedOptimizer was called before smp.DistributedModel; wrap the model "
                "first."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise MpxlaError(
                f"smp.DistributedOptimizer wraps a torch.optim.Optimizer, not a "
                f"{type(optimizer).__name__}."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MpxlaError(
                "LBFGS calls the loss function as often as it likes within one step, which a step "
                "function cannot do; use an optimizer whose step() takes no closure."
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise MpxlaError("this optimizer is a DistributedOptimizer already.")
        if session.topology.tp_size > 1 and not is_elementwise(optimizer):
            refuse_with_shards(
                f"{type(optimizer).__name__}, which does not update every element by itself,"
            )
        self._session_models = session.models
        self._models = _models_of(optimizer, session.models)
        if any(model.divides_updates and model.partitioned for model in self._models):
            equalize_beside(session, tensors_beside(optimizer))
        if any(model.divides_updates for model in self._models):
            check_elementwise(optimizer)
        elif session.topology.pp_size > 1 and mixes_parameters(optimizer):
            kind = type(optimizer).__name__
            warn_once(
                f"{kind} mixes parameters",
                f"{kind} updates a parameter by the values of others too (a norm over all of them, "
                f"perhaps), and every rank has the parameters of its stages only: the update uses "
                f"this rank's share, and differs from that of one process. Clip by "
                f"torch.nn.utils.clip_grad_norm_ before optimizer.step(), which sees all ranks, or "
                f"use norms of single parameters.",
            )
        # Optimizer.__init__ is not called: groups, state and hooks are those of the inner one.
        self.optimizer = optimizer
        self._backend = session.backend
        self._update = CompiledUpdate(optimizer, session.backend)
        self._deferred: dict[str, Any] | None = None
        # Parameters by group, from the placement of the first model until that of the last one.
        self._unplaced: list[list[torch.nn.Parameter]] | None = None
        self._pieces: OptimizerPieces | None = None
        self._positions = {
            id(parameter): position for position, parameter in enumerate(_parameters_of(optimizer))
        }
        self._group_sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._param_names = [_names_in(group) for group in optimizer.param_groups]
        for model in self._models:
            model.attach_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        if name in _MISSING:
            raise AttributeError(
                f"optimizer.{name} belongs to {_MISSING[name]}, which mpxla does not have yet."
            )
        try:
            return getattr(self.optimizer, name)
        except AttributeError:
            raise no_such_attribute(self, name, self.optimizer) from None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the inner optimizer, holding this rank's parameters."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Optimizer state of this rank's parameters."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Default settings of the inner optimizer."""
        return self.optimizer.defaults

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates this rank's parameters from their gradients; call outside `smp.step` functions.

        With `shard_optimizer_state`, every replica updates its share, and all ranks must call it.

        Raises:
            MpxlaError: a closure was given (it would have to run the step function).
            StepError: called inside a step function.
        """
        if current_recorder() is not None:
            raise StepError(
                f"optimizer.step() was called in a step function{at_user_line()}, which is "
                f"captured once and runs for every microbatch. Call it after the step call."
            )
        if closure is not None:
            raise MpxlaError(
                "DistributedOptimizer.step takes no closure: call the step function, then step()."
            )
        self._notice_groups()
        if self._pieces is not None:
            self._pieces.refresh()
        if any(group["params"] for group in self.optimizer.param_groups):
            self._update.step()
            if not self._update.was_compiled:
                self._backend.adopt([*self._updated(), *tensors_beside(self.optimizer)])
        if self._pieces is not None:
            self._pieces.publish()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this rank's parameters."""
        self._notice_groups()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if self._pieces is not None:
            self._pieces.clear_gradients()
        if not set_to_none:
            gradients = [p.grad for p in _parameters_of(self.optimizer) if p.grad is not None]
            self._backend.adopt(gradients)

    def _updated(self) -> list[torch.Tensor]:
        """Parameters and state, which an update changes; pending values of the user are not."""
        parameters = _parameters_of(self.optimizer)
        state = [
            value
            for parameter in parameters
            for value in self.optimizer.state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor)
        ]
        return [*parameters, *state]

    def describe_settings(self) -> str:
        """Class and settings of all param groups, without values on a device."""
        groups = [
            {k: v for k, v in group.items() if isinstance(v, _PLAIN) or _is_plain_tuple(v)}
            for group in self.optimizer.param_groups
        ]
        return f"{self.kind} {groups}"

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """State of this rank's parameters, on the host, numbered as in the full optimizer.

        Args:
            gather_if_shard: with `shard_optimizer_state`, gather the shares of all replicas (all
                ranks must call it then); else the state is that of this rank's share alone.
        """
        self._notice_groups()
        inner = self.optimizer.state_dict()
        values = to_host(inner["state"], self._backend)
        local = [self._positions[id(p)] for p in _parameters_of(self.optimizer)]
        groups, first = [], 0
        for group, size, names in zip(
            inner["param_groups"], self._group_sizes, self._param_names, strict=True
        ):
            groups.append({**group, **names, "params": list(range(first, first + size))})
            first += size
        state = {local[number]: value for number, value in values.items()}
        partial = {"state": state, "param_groups": groups, PARTIAL_KEY: True, HELD_KEY: local}
        if self._pieces is None:
            return partial
        partial[SHARD_KEY] = self._pieces.ranges()
        return self._join(partial) if gather_if_shard else partial

    def _join(self, partial: Mapping[str, Any]) -> dict[str, Any]:
        """States of whole parameters from the shares of all replicas."""
        session = current()
        group = session.topology.dp_group(session.rank)
        return join_shards(session.state_objects.allgather(dict(partial), group))

    def orig_state_dict(self) -> dict[str, Any]:
        """State of the inner optimizer, without gathering."""
        return self.optimizer.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """State of the plain optimizer, on the host, gathered over the ranks of the replica.

        All ranks of a replica must call it; with `shard_optimizer_state`, all ranks.
        """
        refuse_with_shards("optimizer.state_dict()")
        session = current()
        group = session.topology.pp_group(session.rank)
        ranks = group if self._pieces is None else session.topology.world_group()
        what = "optimizer.state_dict"
        with self._session_models.together(f"{what}()", ranks), session.gathering(what, group):
            parts = session.state_objects.allgather(self.local_state_dict(), group)
        return merge_optimizer_states(parts)

    def save_optimizer_backcompat(self, f: str, gather_if_shard: bool = True) -> None:
        """Saves as `smp.save(optimizer.local_state_dict(), f)` does; all ranks call it.

        The name is that of a helper in SMP's scripts; files are not those of SMP.

        Args:
            f: path; the rank is added to it.
            gather_if_shard: as for `local_state_dict`; without it, every rank writes a file.
        """
        state = self.local_state_dict(gather_if_shard)
        is_own = SHARD_KEY in state
        if is_own or current().topology.rdp_rank(current().rank) == 0:
            save(state, f, v3=is_own)

    def load_optimizer_backcompat(self, f: str, gather_if_shard: bool = True) -> None:
        """Loads what `save_optimizer_backcompat` wrote. All ranks call it.

        Args:
            f: as it was given there.
            gather_if_shard: as it was given there; the files tell.
        """
        self.load_state_dict(load(f))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a full state dict, or the partial ones of all ranks of a replica.

        Before the model is partitioned it takes effect right after partitioning. Partial dicts are
        merged first, so all ranks of the replica must call it with theirs (all ranks, with those
        of single shares).

        Raises:
            ValueError: the dict has other param groups.
        """
        if PARTIAL_KEY not in state_dict:
            refuse_with_shards("optimizer.load_state_dict() with a full state")
        else:
            session = current()
            group, is_divided = session.topology.pp_group(session.rank), SHARD_KEY in state_dict
            ranks = session.topology.world_group() if is_divided else group
            with self._session_models.together("optimizer.load_state_dict(partial state)", ranks):
                if is_divided:
                    state_dict = self._join(state_dict)
                parts = session.state_objects.allgather(dict(state_dict), group)
            state_dict = merge_optimizer_states(parts)
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != self._group_sizes:
            raise ValueError(
                f"the optimizer state has param groups of sizes {sizes}, and this optimizer of "
                f"sizes {self._group_sizes}; build the optimizer as it was when "
                f"the state was saved."
            )
        if self.is_placed:
            self._load_local(state_dict)
        else:
            self._deferred = state_dict

    def take_over(self, source: int) -> None:
        """Replicas take the optimizer state of one of them. Collective over the replicas.

        Args:
            source: index of that replica.
        """
        session = current()
        group = session.topology.dp_group(session.rank)
        own = self.local_state_dict() if session.rank == group[source] else None
        state = session.state_objects.allgather(own, group)[source]
        if own is None:
            self._load_local(state)

    def _load_local(self, full: dict[str, Any]) -> None:
        if self._pieces is not None:
            full = self._pieces.cut(full)
        self._load_picked(full)

    def _load_picked(self, full: dict[str, Any]) -> None:
        """Loads the states of what this rank updates, which are cut as it is."""
        kept = [[self._positions[id(p)] for p in g["params"]] for g in self.optimizer.param_groups]
        self.optimizer.load_state_dict(pick_optimizer_state(full, kept))

    # --- checkpoints: by parameter name, so that the topology may change ------------------------

    def _names(self) -> dict[int, str]:
        """Position of a parameter -> its name in the model; of several, with their labels."""
        names: dict[int, str] = {}
        for model in self._models:
            prefix = f"{model.label}." if len(self._models) > 1 and model.label else ""
            names |= {id(p): f"{prefix}{n}" for n, p in model.module.named_parameters()}
        found: dict[int, str] = {}
        for ident, position in self._positions.items():  # pieces come after their parameters
            found.setdefault(position, names.get(ident, f"parameter {position} of the optimizer"))
        return found

    def _range_of(self, parameter: torch.nn.Parameter) -> tuple[int, int, tuple[int, ...]] | None:
        """(start, stop, shape of the whole) of a piece of a parameter; None for a whole one."""
        ranges = {} if self._pieces is None else self._pieces.ranges()
        found = ranges.get(self._positions[id(parameter)])
        return None if found is None else (*found[0], found[1])

    def state_pieces(self) -> Iterator[StatePiece]:
        """State that this rank holds, by parameter name. Values are not copied."""
        names = self._names()
        for parameter in _parameters_of(self.optimizer):
            name, part = names[self._positions[id(parameter)]], self._range_of(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                is_tensor = isinstance(value, torch.Tensor)
                if part is not None and is_tensor and value.shape == parameter.shape:
                    yield StatePiece(name, key, value, part[2], part[0])
                else:
                    yield StatePiece(name, key, value)

    @property
    def kind(self) -> str:
        """Class of the inner optimizer, whose state no other class takes."""
        return type(self.optimizer).__name__

    def group_settings(self) -> list[dict[str, Any]]:
        """Settings of every param group, with the names of its parameters under "params"."""
        names = iter(self._names().values())
        return [
            to_host({k: v for k, v in group.items() if k not in _OF_RANK}, self._backend)
            | {"params": [next(names) for _ in range(size)]}
            for group, size in zip(self.optimizer.param_groups, self._group_sizes, strict=True)
        ]

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
            group.update({k: v for k, v in other.items() if k not in _OF_RANK})

    def load_saved_state(self, saved: SavedState) -> None:
        """Loads the state of this rank's parameters. After partitioning."""
        names = self._names()
        state: dict[int, Any] = {}
        for parameter in _parameters_of(self.optimizer):
            position = self._positions[id(parameter)]
            name, part = names[position], self._range_of(parameter)
            entry: dict[str, Any] = {}
            for key in saved.keys(name):
                if part is not None and saved.shape(name, key) == part[2] != ():
                    entry[key] = saved.flat(name, key, part[0], part[1] - part[0])
                else:
                    entry[key] = saved.whole(name, key)
            entry.update(saved.numbers(name))
            if entry:
                state[position] = entry
        self._load_picked({"state": state, "param_groups": self.optimizer.param_groups})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of the model to the inner optimizer."""
        self.optimizer.add_param_group(param_group)
        self._notice_groups()

    def _notice_groups(self) -> None:
        """Takes in groups that were added since, perhaps to the inner optimizer."""
        new = self.optimizer.param_groups[len(self._group_sizes) :]
        for group in new:
            first = sum(self._group_sizes)
            for position, parameter in enumerate(group["params"], first):
                self._positions[id(parameter)] = position
            self._group_sizes.append(len(group["params"]))
            self._param_names.append(_names_in(group))
        for model in _models_of(self.optimizer, self._session_models) if new else ():
            if model not in self._models:
                self._models.append(model)
                model.attach_optimizer(self)
        if new and any(model.partitioned for model in self._models):
            self.keep_local()

    @property
    def is_placed(self) -> bool:
        """Whether all its models are partitioned."""
        return all(model.partitioned for model in self._models)

    def keep_local(self) -> None:
        """Takes what other ranks update out of the groups, and moves existing state."""
        if self._unplaced is None:
            self._unplaced = [list(group["params"]) for group in self.optimizer.param_groups]
        unplaced = (model for model in self._models if not model.partitioned)
        waiting = {ident for model in unplaced for ident in model.parameter_ids()}
        for group in self.optimizer.param_groups:
            elsewhere = {
                p for p in group["params"] if p.device.type == "meta" and id(p) not in waiting
            }
            group["params"] = [p for p in group["params"] if p not in elsewhere]
            for parameter in elsewhere:
                self.optimizer.state.pop(parameter, None)
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[key] = value.to(parameter.device)
        self._divide()
        if self.is_placed:
            before, self._unplaced = self._unplaced, None
            self._take_along(before)
        if self._deferred is not None and self.is_placed:
            deferred, self._deferred = self._deferred, None
            self._load_local(deferred)

    def _take_along(self, before: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        """What the optimizer keeps of its parameters outside of its state follows them."""
        session = current()
        own = {id(p) for group in before for p in group}
        beside = [t for t in tensors_beside(self.optimizer) if id(t) not in own]
        equalize_beside(session, beside)
        states = [model.tensors for model in self._models]
        carrier = Carrier(type(self.optimizer), states, session.device)

        def heirs(parameter: torch.nn.Parameter) -> list[Heir]:
            is_divided, piece = self._pieces.heir(parameter) if self._pieces else (False, None)
            if is_divided:
                return [] if piece is None else [carrier.part(parameter, piece)]
            return [] if parameter.is_meta else [carrier.whole(parameter)]

        follow_parameters(self.optimizer, before, heirs, carrier.move)

    def _divide(self) -> None:
        """With `shard_optimizer_state`: replaces parameters by this replica's pieces of them."""
        for model in self._models:
            if model.shards is None:
                continue
            if self._pieces is None:
                self._pieces = OptimizerPieces(self.optimizer, self._positions)
            self._pieces.divide(model.tensors, model.shards)


def _models_of(optimizer: torch.optim.Optimizer, models: Models) -> list[DistributedModel]:
    """The models whose parameters an optimizer holds; the only one in any case.

    An optimizer of the parameters of one rank may have none there, and goes with all models.

    Raises:
        MpxlaError: it holds other parameters only.
    """
    given, known = _parameters_of(optimizer), list(models)
    found = models.holding(given)
    if not found and given and len(known) > 1:
        raise MpxlaError(
            f"the {type(optimizer).__name__} given to smp.DistributedOptimizer holds parameters of "
            f"none of the {len(known)} distributed models; build it from those of the model that "
            f"it is to train."
        )
    return found or known


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_plain_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, _PLAIN) for part in value)


def _names_in(group: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names that torch keeps of a group's parameters, if they were given with names."""
    return {"param_names": list(group["param_names"])} if "param_names" in group else {}
