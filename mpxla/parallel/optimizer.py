"""`DistributedOptimizer`: the user's optimizer, restricted to this rank's parameters.

Parameters keep their identity when the model is partitioned, so param groups, optimizer state and
LR schedulers stay as they are; what other ranks own is taken out of the groups. A facade: updates
are in `update`, what is updated in `store`, the forms of the state in `optimizer_state`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpxla.checkpoint.single import load, save
from mpxla.config import Config
from mpxla.errors import MpxlaError, StepError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.user_code import at_user_line
from mpxla.log import get_logger
from mpxla.nn.distribute import refuse_with_shards
from mpxla.parallel.contents import NoSuchAttributeError
from mpxla.parallel.gradients.loss_scale import LossScale
from mpxla.parallel.gradients.norms import clip_grad_norm_
from mpxla.parallel.programs import Programs
from mpxla.parallel.replica import equalize_beside
from mpxla.parallel.state_dicts import PARTIAL_KEY, gone_of, merge_optimizer_states, numbered
from mpxla.parallel.updates.carrier import take_along
from mpxla.parallel.updates.closures import Closure, ClosureSteps
from mpxla.parallel.updates.companions import tensors_beside
from mpxla.parallel.updates.elementwise import check_elementwise, is_elementwise
from mpxla.parallel.updates.groups import parameters_of
from mpxla.parallel.updates.optimizer_state import Numbers, OptimizerState
from mpxla.parallel.updates.others import parameters_of_others
from mpxla.parallel.updates.pieces import SHARD_KEY, join_shards, published
from mpxla.parallel.updates.rounding import UpdateRounding
from mpxla.parallel.updates.shown_state import ShownState
from mpxla.parallel.updates.stochastic_rounding import StochasticRounding, check_parameters
from mpxla.parallel.updates.update import CompiledUpdate
from mpxla.session import current

__all__ = ["DistributedOptimizer"]


_NORM = "_global_grad_norm"
"""Attribute that is there with sharded data parallelism only."""
_OF_FP16 = ("overflow", "loss_scale")
"""Attributes that are there with `fp16: True` only."""
_OF_MASTERS = "param.grad of the model's own shows those, in float32."
_OF_DIVIDED = "param.grad of the model's own gathers those: all replicas have to ask for it."
_OF_PIECES = (
    "param.grad of the model's own is None: code that changes or reads gradients finds them in "
    "param_groups; clipping by torch.nn.utils or smp finds them anywhere."
)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a `torch.optim` optimizer for the distributed model whose parameters it holds.

    It may hold parameters of several models. Build the inner optimizer from the raw model's
    parameters before wrapping, or from `DistributedModel.parameters()`. The wrapper shares
    `param_groups`, `state` and `defaults` with it, so that LR schedulers work on either. (SMP API
    reference, "DistributedOptimizer".)

    Args:
        optimizer: the optimizer to wrap.
        static_loss_scale: loss scale of `fp16: True`, without which it has no effect.
        dynamic_loss_scale: whether the scale of `fp16: True` moves by itself.
        dynamic_loss_args: settings of a scale that moves, see `LossScale`.
        **settings: the same by keyword.

    Attributes:
        overflow: with `fp16: True`, whether the last `step` was left out, because gradients were
            inf or nan on some rank.
        loss_scale: with `fp16: True`, what losses of the next step are multiplied by.
        contents: its state, as checkpoints hold it.
        _global_grad_norm: with sharded data parallelism, the norm of all gradients in the last
            `step`, before it clipped them; a scalar on the device. (The name is SMP's.)

    Raises:
        MpxlaError: there is no `DistributedModel` yet, it is not a torch optimizer, or it holds
            parameters of none of several models.
    """

    _step_supports_amp_scaling = False  # fused optimizers do, and skip updates by themselves

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **settings: Any,
    ):
        session = current()
        if session.models is None:
            raise MpxlaError(
                "smp.DistributedOptimizer was called before smp.DistributedModel; wrap the model "
                "first."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MpxlaError(
                f"smp.DistributedOptimizer wraps a torch.optim.Optimizer, not a "
                f"{type(optimizer).__name__}."
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise MpxlaError("this optimizer is a DistributedOptimizer already.")
        if session.topology.tp_size > 1 and not is_elementwise(optimizer):
            what = f"{type(optimizer).__name__}, which does not update every element by itself,"
            refuse_with_shards(what, session.topology.tp_size)
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            # Its class leaves out Optimizer.__init__, as Lookaheads do; so are pickled ones made.
            settings_of_inner = getattr(optimizer, "defaults", {})
            torch.optim.Optimizer.__setstate__(optimizer, {"defaults": settings_of_inner})
        self._session = session
        self._session_models = session.models
        self._models = session.models.of_optimizer(optimizer)
        if any(model.divides_updates and model.partitioned for model in self._models):
            equalize_beside(session, tensors_beside(optimizer))
        if any(model.divides_updates for model in self._models):
            check_elementwise(optimizer, _dividing_key(session.config))
        # Optimizer.__init__ is not called: groups, state and hooks are those of the inner one.
        self.optimizer = optimizer
        self._backend = session.backend
        self._max_norm: float | None = None
        if session.config.sharded_data_parallel_degree > 1:
            self._max_norm = session.config.sdp_gradient_clipping
            self._global_grad_norm: torch.Tensor | None = None
        self._scale: LossScale | None = None
        if session.config.fp16:
            given = {**(dynamic_loss_args or {}), **settings}
            self._scale = LossScale(static_loss_scale, dynamic_loss_scale, given)
            self.overflow = False
        # Whether gradients are divided by the scale already, and if so, have overflowed.
        self._has_overflowed: bool | None = None
        self._deferred: dict[str, Any] | None = None
        # Parameters by group, from the placement of the first model until that of the last one.
        self._unplaced: list[list[torch.nn.Parameter]] | None = None
        numbers: dict[str, Numbers] = {}
        if self._scale is not None:
            numbers["loss_scale"] = self._scale
        self._rounding: StochasticRounding | None = None
        if session.config.stochastic_rounding:
            check_parameters(parameters_of(optimizer))
            self._rounding = numbers["stochastic_rounding"] = StochasticRounding()
        self.contents = OptimizerState(optimizer, self._models, session.backend, numbers)
        self._pieces = self.contents.pieces
        self._shown = ShownState(self.contents)
        programs = Programs(session.backend)
        rounding = self._rounding and UpdateRounding(
            optimizer, self._rounding, self.contents.origins, programs
        )
        self._update = CompiledUpdate(
            optimizer, session.backend, self._pieces, rounding, session.kept
        )
        self._others = parameters_of_others(
            self.contents, session, session.models, self._update, self._rounding is not None
        )
        self._closures = ClosureSteps(self.contents, session, self._update)
        for model in self._models:
            model.attach_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        if name == "loss_scale" and self._scale is not None:
            return self._scale.value
        if name in _OF_FP16:
            raise AttributeError(
                f"optimizer.{name} belongs to loss scaling, which the key fp16: True switches on."
            )
        if name == _NORM:
            raise AttributeError(
                f"optimizer.{name} belongs to sharded data parallelism, which the key "
                f"sharded_data_parallel_degree switches on."
            )
        try:
            found = getattr(self.optimizer, name)
        except AttributeError:
            raise NoSuchAttributeError(self, name, self.optimizer) from None
        return published(found, self.optimizer, self._pieces, self._update, self._others)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the inner optimizer, holding this rank's parameters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # type: ignore[override]
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Optimizer state of this rank's parameters, by what the groups or the model have."""
        return self._shown

    @state.setter
    def state(self, state: Any) -> None:  # type: ignore[override]
        self.optimizer.state = state.inner if isinstance(state, ShownState) else state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Default settings of the inner optimizer."""
        return self.optimizer.defaults

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates this rank's parameters from their gradients; call outside `smp.step` functions.

        With `shard_optimizer_state`, every replica updates its share, and all ranks must call it.
        So they do with `sharded_data_parallel_degree`, where gradients are clipped first, by their
        norm over all ranks (`sdp_gradient_clipping`).

        Args:
            closure: calls `zero_grad` and the step function, and returns the loss, the same on all
                ranks of a replica. All ranks call `step` with it.

        Returns:
            What the closure returned at first; None without a closure.

        Raises:
            MpxlaError: LBFGS without a closure, or an optimizer that calls it as it likes with
                `fp16: True`.
            StepError: called inside a step function.
        """
        if current_recorder() is not None:
            raise StepError(
                f"optimizer.step() was called in a step function{at_user_line()}, which is "
                f"captured once and runs for every microbatch. Call it after the step call."
            )
        if self._closures.are_needed or closure is not None:
            return self._closures.step(self, closure)
        if not self.prepare_update():
            return None
        if self._others or any(group["params"] for group in self.optimizer.param_groups):
            self.run_update()
        elif clip := getattr(self.optimizer, "clip_gradients", None):
            clip()  # by the norm over all ranks, in which all have to take part
        self._pieces.publish(has_masters=not self._update.was_compiled)
        return None

    def prepare_update(self) -> bool:
        """Brings gradients to what is updated, scaled and clipped; whether they are to be used."""
        for model in self._models:
            model.tensors.check_divided()
        if self._are_divided:
            self._session_models.tell_of_update(f"optimizer.step() of {self.kind}")
        self._notice_groups()
        if any(model.partitioned for model in self._models):
            self._load_deferred()  # of models that no step has used yet, too
        self._pieces.tell_of_writes()
        self._pieces.collect_gradients()
        if self._scale is not None:
            self.unscale()
            self.overflow = bool(self._has_overflowed)
            self._scale.update(self.overflow)
            if self.overflow:
                return False
        if self._max_norm is not None:
            given = parameters_of(self.optimizer)
            self._global_grad_norm = clip_grad_norm_(given, self._max_norm)
        if self._rounding is not None:
            self._rounding.advance()
        self._pieces.renew_divided()
        return True

    def run_update(self, closure: Closure | None = None) -> Any:
        """Runs the inner optimizer; what it leaves pending is started."""
        if self._others is None:
            result = self._update.step(closure)
        else:
            with self._others.there(f"optimizer.step() of {self.kind}"):
                result = self._update.step(closure and self._others.around(closure))
        self.settle_update()
        return result

    def settle_update(self) -> None:
        """Starts what an update that is not compiled has left pending in what it changes."""
        if not self._update.was_compiled:
            parameters = parameters_of(self.optimizer)
            states = (self.optimizer.state.get(parameter, {}) for parameter in parameters)
            kept = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
            self._backend.adopt([*parameters, *kept, *tensors_beside(self.optimizer)])

    def unscale(self) -> None:
        """Divides the gradients by the loss scale of `fp16: True`, once; all ranks must call it."""
        if self._scale is not None and self._has_overflowed is None:
            self._has_overflowed = self.unscale_gradients(self._scale.value)

    def scale_again(self) -> None:
        """Multiplies gradients that were divided by the loss scale: others are to be added."""
        if self._scale is None or self._has_overflowed is None:
            return
        self._has_overflowed = None
        parameters = parameters_of(self.optimizer)
        self._session_models.unscaling.multiply(parameters, self._scale.value)

    def unscale_gradients(self, scale: float) -> bool:
        """Divides the gradients by a loss scale. All ranks must call it; waits for them.

        Returns:
            Whether gradients of some rank are inf or nan.
        """
        self._notice_groups()  # masters of what was frozen until now have scaled gradients, too
        self._pieces.collect_gradients()
        return self._session_models.unscaling(parameters_of(self.optimizer), scale)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of all ranks by their norm, without loss scale. Before `step`.

        All ranks must call it. (SMP API reference, "clip_master_grads".)

        Args:
            max_norm: largest norm that stays.
            norm_type: order of the norm.

        Returns:
            The norm before clipping, a scalar on the device.
        """
        return clip_grad_norm_(parameters_of(self.optimizer), max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this rank's parameters."""
        self._has_overflowed = None
        self._notice_groups()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._pieces.clear_gradients()
        if not set_to_none:
            gradients = [p.grad for p in parameters_of(self.optimizer) if p.grad is not None]
            self._backend.adopt(gradients)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """State of this rank's parameters, on the host, numbered as in the full optimizer.

        Args:
            gather_if_shard: with `shard_optimizer_state`, gather the shares of all replicas (all
                ranks must call it then); else the state is that of this rank's share alone.
        """
        self._notice_groups()
        partial = self.contents.with_numbers(self.contents.of_rank(self._are_divided))
        return self._join(partial) if self._are_divided and gather_if_shard else partial

    @property
    def _are_divided(self) -> bool:
        """Whether replicas hold different parts of the state; the same on all ranks."""
        return any(model.divides_updates and model.partitioned for model in self._models)

    def _join(self, partial: Mapping[str, Any]) -> dict[str, Any]:
        """States of whole parameters from the shares of all replicas."""
        session = self._session
        group = session.topology.rdp_group(session.rank)
        return join_shards(session.state_objects.allgather(dict(partial), group))

    def orig_state_dict(self) -> dict[str, Any]:
        """State of the inner optimizer, without gathering."""
        return self.optimizer.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """State of the plain optimizer, on the host, gathered over the ranks of the replica.

        All ranks of a replica must call it; with `shard_optimizer_state`, all ranks.
        """
        session = self._session
        group = session.topology.pp_group(session.rank)
        ranks = session.topology.world_group() if self._are_divided else group
        what = "optimizer.state_dict"
        with self._session_models.together(f"{what}()", ranks), session.gathering(what, group):
            parts = session.state_objects.allgather(self.local_state_dict(), group)
            full = merge_optimizer_states(parts)
            if session.topology.tp_size > 1:
                sharing, objects = session.topology.tp_group(session.rank), session.state_objects
                full["state"] = self.contents.with_whole_tensors(
                    full["state"], lambda parts: objects.allgather(parts, sharing)
                )
            self.contents.groups.forget(gone_of(parts))
        return self.contents.with_numbers(numbered(full))

    def save_optimizer_backcompat(self, f: str, gather_if_shard: bool = True) -> None:
        """Saves as `smp.save(optimizer.local_state_dict(), f)` does; all ranks call it.

        The name is that of a helper in SMP's scripts; files are not those of SMP.

        Args:
            f: path; the rank is added to it.
            gather_if_shard: as for `local_state_dict`; without it, every rank writes a file.
        """
        state = self.local_state_dict(gather_if_shard)
        is_own = SHARD_KEY in state
        if is_own or self._session.topology.rdp_rank(self._session.rank) == 0:
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

        Before the model is partitioned it takes effect right after partitioning, but for settings
        of param groups, which scripts may change by then. Partial dicts are merged first, so all
        ranks of the replica must call it with theirs (all ranks, with those of single shares).

        Raises:
            ValueError: the dict has other param groups.
        """
        given, state_dict = state_dict, self.contents.without_numbers(state_dict)
        if PARTIAL_KEY in state_dict:
            session = self._session
            group, is_divided = session.topology.pp_group(session.rank), SHARD_KEY in state_dict
            ranks = session.topology.world_group() if is_divided else group
            with self._session_models.together("optimizer.load_state_dict(partial state)", ranks):
                if is_divided:
                    state_dict = self._join(state_dict)
                parts = session.state_objects.allgather(dict(state_dict), group)
            state_dict = numbered(merge_optimizer_states(parts))
        self.contents.check_groups(state_dict)
        self.contents.load_numbers(given)
        if self.is_placed:
            self.contents.load(state_dict)
        else:
            self.contents.load_settings(state_dict)
            self._deferred = state_dict
            if self._unplaced is None:  # of no model, so that the groups hold whole parameters
                self.contents.show(state_dict)

    def take_over(self, source: int) -> None:
        """Replicas take the optimizer state of one, by its index. Collective over the replicas."""
        session = self._session
        group = session.topology.rdp_group(session.rank)
        own = self.local_state_dict() if session.rank == group[source] else None
        state = session.state_objects.allgather(own, group)[source]
        if own is None:
            self.contents.load_numbers(state)
            self.contents.load(state)

    @property
    def kind(self) -> str:
        """Class of the inner optimizer, whose state no other class takes."""
        return type(self.optimizer).__name__

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of the model to the inner optimizer."""
        self.optimizer.add_param_group(param_group)
        self._notice_groups()

    def _notice_groups(self) -> None:
        """Takes in masters and groups that were added since, perhaps to the inner optimizer."""
        has_more = self.contents.notice_groups()
        for model in self._models:
            if self._pieces.is_behind(model.store):  # a parameter was thawed
                self._pieces.exchange(model.store)
        self.contents.groups.remember()
        if not has_more:
            return
        for model in self._session_models.of_optimizer(self.optimizer):
            if model not in self._models:
                self._models.append(model)
                model.attach_optimizer(self)
        if any(model.partitioned for model in self._models):
            self.keep_local()

    @property
    def is_placed(self) -> bool:
        """Whether all its models are partitioned, with what they have got since."""
        return all(model.partitioned and not model.tensors.waiting for model in self._models)

    def keep_local(self) -> None:
        """Takes what other ranks update out of the groups, and moves existing state."""
        if self._unplaced is None:
            self._unplaced = [list(group["params"]) for group in self.optimizer.param_groups]
            if self._deferred is not None:
                self._deferred = self.contents.take_back(self._deferred)
        unplaced = (model for model in self._models if not model.partitioned)
        waiting = {ident for model in unplaced for ident in model.parameter_ids()}
        # Of divided parameters this rank has a part; they have no storage.
        states = [model.tensors for model in self._models]
        waiting |= {id(state.parameters[name]) for state in states for name in state.parts}
        waiting |= {id(parameter) for state in states for parameter in state.waiting}
        for group in self.optimizer.param_groups:
            elsewhere = {
                p for p in group["params"] if p.device.type == "meta" and id(p) not in waiting
            }
            group["params"] = [p for p in group["params"] if p not in elsewhere]
            self.contents.elsewhere |= set(map(id, elsewhere))
            for parameter in elsewhere:
                self.optimizer.state.pop(parameter, None)
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items() if torch.is_tensor(parameter) else ():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[key] = value.to(parameter.device)
        held_before = self._pieces.num_held
        for model in self._models:
            self._pieces.exchange(model.store)
        if self._session.rank == 0 and not held_before and self._pieces.num_held:
            get_logger().info(
                "optimizer.param_groups holds %s in the place of %d parameters of the model, with "
                "their gradients. %s",
                "pieces that replicas divide" if self._are_divided else "masters",
                self._pieces.num_held,
                self._where_gradients_are(),
            )
        self.contents.groups.remember()
        if self.is_placed:
            before, self._unplaced = self._unplaced, None
            take_along(self._session, self.optimizer, before, states, self._pieces.heir)
            self._agree_on_seed()
        if self.is_placed:
            self._load_deferred()

    def _load_deferred(self) -> None:
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            self.contents.load(self.contents.with_settings(deferred))

    def _where_gradients_are(self) -> str:
        if self._session.config.fp16:
            return _OF_PIECES
        return _OF_DIVIDED if self._are_divided else _OF_MASTERS

    def _agree_on_seed(self) -> None:
        """The noise of rounding is that of rank 0, whatever seeds other processes have."""
        if self._rounding is not None and self._rounding.seed is None:
            session = self._session
            world = session.topology.world_group()
            self._rounding.seed = session.objects.allgather(torch.initial_seed(), world)[0]


def _dividing_key(config: Config) -> str:
    """The key that lets replicas divide updates."""
    if config.sharded_data_parallel_degree > 1:
        return "sharded_data_parallel_degree"
    return "shard_gradients" if config.shard_gradients else "shard_optimizer_state"
