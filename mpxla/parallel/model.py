"""`DistributedModel`: the user's model, cut into stages at the first step.

A facade: what it does is done by `PartitionedModule` (parameters and buffers by name),
`LoadableModule`, `Models` (all models of the session, and the engine that runs them) and
`GradientReducer`.
"""

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mpxla.comm.transport import Group, Members
from mpxla.delayed import delay_all_models
from mpxla.errors import CaptureError, MpxlaError, StepError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.log import warn_once
from mpxla.nn.distribute import (
    distribute,
    exchange_registered,
    refuse_with_shards,
)
from mpxla.nn.shared_norm import refuse_with_shared_statistics, share_statistics
from mpxla.parallel.compute_dtype import (
    compute_dtype,
    convert,
    narrowed,
    widened,
    with_scaled_gradients,
)
from mpxla.parallel.copies import DistributedCopy
from mpxla.parallel.gradients.grad_scaler import see_all_overflows
from mpxla.parallel.gradients.plain import PlainBackward
from mpxla.parallel.gradients.reducer import TRANSFER_DTYPES, ReductionOptions
from mpxla.parallel.gradients.torch_clipping import see_all_gradients
from mpxla.parallel.loading import LoadableModule
from mpxla.parallel.models import cut_report, models_of
from mpxla.parallel.scripted import without_scripts
from mpxla.parallel.sharded import (
    check_whole,
    refuse_shared_parts,
    refuse_with_divided_gradients,
)
from mpxla.parallel.store import ParameterStore
from mpxla.parallel.tags import partition_pins
from mpxla.parallel.updates.groups import settings_of
from mpxla.parallel.whole import save_whole, whole_copy
from mpxla.parallel.wrappable import check_module, check_options
from mpxla.runtime.states import Member
from mpxla.session import current

__all__ = ["DistributedModel"]

_parse_to = cast(Any, torch)._C._nn._parse_to
Hook = Callable[["DistributedModel", Any], None]


class DistributedModel(LoadableModule):
    """Wraps a model of a script. (SMP API reference, "smp.DistributedModel".)

    A script may have several (generator and discriminator, teacher and student): a step function
    uses one or more of them, and `backward` of any gives gradients to the parameters of all that
    the loss reaches, as in plain PyTorch. Each is partitioned in the first step that uses it. They
    stay until `smp.shutdown()`, also those that the script drops. They may share parameters.
    (SMP has one model; more are an extension.)

    With several pipeline stages, a model is partitioned in the first call of a step function,
    and may be called only inside step functions. With one, it moves to the device at once, and
    plain calls and `loss.backward()` work as well; over replicas, such a backward reduces the
    gradients before it returns.

    Args:
        module: the model; its parameters stay the same `Parameter` objects.
        trace_device: where SMP traced the model; capture here needs no device, so it is ignored.
        trace_execution_times: time operators on the device and partition by that, instead of by
            operation counts. Times vary, so that another run may be cut in another way.
        overlapping_allreduce: reduce gradients over replicas as they become ready.
        backward_passes_per_step: step calls to accumulate before that reduction.
        average_grads_across_microbatches: mean (or sum) of gradients over microbatches.
        bucket_cap_mb: bucket size of the reduction, in MiB.
        trace_memory_usage: SMP's switch for measuring; sizes are known exactly here.
        broadcast_buffers: after every training step, replicas take the buffers of the first one.
        gradient_as_bucket_view: option of DDP without meaning here.

    Raises:
        MpxlaError: the module is not one that can be wrapped.
        ConfigError: an option that is not available was asked for.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ):
        session = current()
        if isinstance(module, DistributedModel):
            raise MpxlaError("this model is a DistributedModel already.")
        module = without_scripts(module)
        check_module(module)
        check_options(trace_device, trace_execution_times, backward_passes_per_step)
        if trace_execution_times:
            what = "DistributedModel(trace_execution_times=True)"
            refuse_with_shards(what, session.topology.tp_size)
        if gradient_as_bucket_view:
            warn_once(
                "gradient_as_bucket_view",
                "DistributedModel(gradient_as_bucket_view=True) has no effect: gradients are "
                "results of the stages' programs, each with memory of its own.",
            )
        delay_all_models(False)  # by the configuration key; the model is there now
        self._compute_dtype = compute_dtype(session.config)
        if self._compute_dtype is not None:
            convert(module, self._compute_dtype)
        sharing = session.topology.tp_group(session.rank)
        module = exchange_registered(module)
        shards = distribute(module, Members(sharing, session.transport))
        share_statistics(module, session.topology.rdp_group(session.rank))
        super().__init__(module, session, shards)
        place = session.topology.sdp_group(session.rank).index(session.rank)
        threshold = session.config.sdp_param_persistence_threshold
        keeps_whole = session.config.shard_gradients
        self._state.divide(place, session.topology.sdp, threshold, keeps_whole)
        self._optimizers: list[Any] = []
        self.copies: list[weakref.ref[DistributedCopy]] = []
        # RemovableHandle refers to them weakly, which a plain dict does not allow.
        self._partition_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._step_hooks: OrderedDict[int, Hook] = OrderedDict()
        options = ReductionOptions(
            bucket_cap_mb,
            backward_passes_per_step,
            average_grads_across_microbatches,
            overlapping_allreduce,
            broadcast_buffers,
            TRANSFER_DTYPES[session.config.reduction_dtype],
            session.config.shard_optimizer_state
            and not keeps_whole  # which divides each parameter's state by itself
            and session.topology.rdp_size > 1,
            1 if session.config.prescaled_batch else session.topology.tp_size,
        )
        self._models = models_of(session)
        refuse_shared_parts(self._state, [other.tensors for other in self._models])
        self._engine = self._models.engine
        self._is_single = session.config.pipeline_parallel_degree == 1
        pins = partial(partition_pins, self.module)
        places = {name: shard.place for name, shard in shards.items()}
        self._names_of_parts = (
            set(self._state.canonical_names.values()) if len(sharing) > 1 else None
        )
        member = Member(
            self._state, pins, self._when_placed, trace_execution_times, self._before_new, places
        )
        self.label, self._reducer = self._models.add(self, member, options)
        see_all_gradients()
        see_all_overflows()
        save_whole(self, session)
        self._plain_backward: PlainBackward | None = None
        if self._is_single:
            self._engine.arrivals.adopt_single_stage(self.label)
            if session.topology.rdp_size > 1 and not self._state.shards:
                self._plain_backward = PlainBackward(self._reducer)

    # --- copies -----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedCopy:
        """A copy with values of its own on the same ranks, for evaluation. See `copies`."""
        return DistributedCopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved by `torch.save`, it is the user's module as a whole; see `whole`."""
        return whole_copy(self, self._session).__reduce_ex__(1)  # may be of another class

    @property
    def num_stages(self) -> int:
        """Pipeline ranks that share the model."""
        return self._session.topology.pp_size

    def _living_copies(self) -> list[DistributedCopy]:
        found = [(reference, reference()) for reference in self.copies]
        self.copies = [reference for reference, copy in found if copy is not None]
        return [copy for _, copy in found if copy is not None]

    # --- use ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the user's model; only inside a step function when there are several stages.

        Raises:
            StepError: called outside with several stages.
        """
        is_plain = current_recorder() is None and not self._state.is_lent
        if is_plain and not self._is_single:
            raise StepError(
                "the model was called outside a step function. With pipeline_parallel_degree > 1 "
                "its parts live on different ranks: call it in a function decorated with "
                "@smp.step, or in a block of model.summon_full_params()."
            )
        if is_plain:
            check_whole(self._state)
            if self._is_single and not self._engine.is_tracing:
                self._engine.arrivals.adopt_single_stage(self.label)  # what the model has got since
        if is_plain and self._plain_backward is not None:
            self._plain_backward.watch()
        if self._compute_dtype is None:
            return self.module(*args, **kwargs)
        # In steps the backward starts from the loss scale; a plain one from what autograd gives.
        scale = self.begin_with_loss_scale() if is_plain else 1.0
        args, kwargs = narrowed((args, kwargs), self._compute_dtype)
        args, kwargs = with_scaled_gradients((args, kwargs), 1.0 / scale)
        results = widened(self.module(*args, **kwargs), self._compute_dtype)
        return with_scaled_gradients(results, scale)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Differentiates, like `torch.autograd.backward`, over all stages.

        Args:
            tensors: a scalar loss, or a sequence of tensors.
            grad_tensors: gradients of the tensors, where they are not scalars.

        Raises:
            StepError: called outside a step function with several stages.
        """
        recorder = current_recorder()
        if recorder is not None:
            recorder.backward(tensors, grad_tensors)
        elif self._is_single:
            torch.autograd.backward(tensors, grad_tensors)
        else:
            raise StepError(
                "model.backward was called outside a step function; call it in the function "
                "decorated with @smp.step that computes the loss."
            )

    def begin_with_loss_scale(self) -> float:
        """The loss scale of a pass that begins; gradients of earlier ones get it as well."""
        scale = self.loss_scale()
        for optimizer in self._optimizers:
            optimizer.scale_again()
        return scale

    def loss_scale(self) -> float:
        """What the losses of its steps are multiplied by: the scale of its optimizers.

        Raises:
            StepError: its optimizers have different ones.
        """
        scales = {o.loss_scale for o in self._optimizers if hasattr(o, "loss_scale")}
        if len(scales) > 1:
            raise StepError(
                f"the optimizers of a model have different loss scales ({sorted(scales)}); one "
                f"step has one loss scale. Use one optimizer with several param groups, or equal "
                f"static scales."
            )
        return scales.pop() if scales else 1.0

    def to(self, *args: Any, **kwargs: Any) -> "DistributedModel":  # type: ignore[override]
        """As `Module.to` for dtypes. A device has no effect, since stages decide."""
        device, dtype, _, memory_format = _parse_to(*args, **kwargs)
        if device is not None and device.type != self._backend.device.type:
            warn_once(
                "model.to",
                "model.to(device) is ignored: the first step places every parameter on its rank's "
                "device.",
            )
        if dtype is None and memory_format is None:
            return self
        convert = cast(Callable[..., DistributedModel], super().to)  # it takes both by name
        return convert(dtype=dtype, memory_format=memory_format)

    def cuda(self, device: Any = None) -> "DistributedModel":  # type: ignore[override]
        """As `to(device)`."""
        return self.to(torch.device("cuda") if device is None else device)

    def partition_report(self) -> str:
        """Table of the stages: modules, parameters, operations, sizes. Extension of SMP's API.

        They are those of the step that partitioned the model; it may use other models as well.

        Raises:
            MpxlaError: no step has run yet.
        """
        cut = self._engine.first_cuts.get(self.label)
        if cut is None:
            raise MpxlaError(
                "the model is partitioned by the first call of a step function that uses it."
            )
        return cut_report(cut)

    def partition_decision(self) -> dict[str, Any]:
        """Which pipeline ranks hold each parameter and buffer, as plain data. For checkpoints."""
        self._require_partition("partition_decision")
        return self._engine.placement.decision(self.label)

    def restore_partition(self, decision: Mapping[str, Any]) -> None:
        """Makes the first step cut the model as it was when a checkpoint was saved.

        Called before partitioning, on all ranks.
        """
        self._engine.placement.follow_decision(self.label, decision)

    def together(self, what: str, ranks: Group) -> contextlib.AbstractContextManager[None]:
        """Around a call of the user that several ranks make together. See `Models.together`."""
        return self._models.together(what, ranks)

    # --- hooks ----------------------------------------------------------------------------------

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Registers `hook(model, optimizer)`, run after partitioning, before the first forward.

        `optimizer` is the `DistributedOptimizer`, or None where there is none.

        Raises:
            MpxlaError: the model is partitioned already and has several stages.
        """
        if self.partitioned and not self._is_single:
            raise MpxlaError(
                "register_post_partition_hook was called after the model was partitioned; register "
                "hooks before the first step."
            )
        handle = RemovableHandle(self._partition_hooks)
        self._partition_hooks[handle.id] = hook
        return handle

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Registers `hook(model, optimizer)`, run at the end of every step call with the model."""
        handle = RemovableHandle(self._step_hooks)
        self._step_hooks[handle.id] = hook
        return handle

    def reduce_next_step(self) -> None:
        """The next step call ends in a reduction, though fewer than usual have been before it.

        For the last `optimizer.step()` of an epoch, if the number of its batches is no multiple of
        `backward_passes_per_step`. All ranks call it. Extension of SMP's API.
        """
        self._reducer.reduce_next()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this rank's parameters, and of its update copies."""
        super().zero_grad(set_to_none)
        self.store.clear_gradients(set_to_none=set_to_none)

    def attach_optimizer(self, optimizer: Any) -> None:
        """Called by `DistributedOptimizer`: its groups follow the parameters."""
        self._optimizers.append(optimizer)
        if self.partitioned:
            optimizer.keep_local()

    @property
    def optimizers(self) -> list[Any]:
        """Every `DistributedOptimizer` with parameters of this model."""
        return list(self._optimizers)

    def parameter_ids(self) -> set[int]:
        """Identities of the parameters that belong to it, and of this rank's update copies."""
        known = self._state.parameters
        owned = [known[name] for name in self._reducer.names.values() if name in known]
        return {id(p) for p in (*owned, *(copy.parameter for copy in self.store.copies()))}

    def optimizer_settings(self) -> str:
        """Settings of the optimizers, in words that are equal on all replicas."""
        return "; ".join(settings_of(one.optimizer) for one in self._optimizers)

    def first_optimizer(self) -> Any:
        """The `DistributedOptimizer`, or None where there is none."""
        return self._optimizers[0] if self._optimizers else None

    def _before_new(self) -> None:
        """Called before parameters and buffers are taken in that it has got since it was wrapped.

        Raises:
            CaptureError: there are some, and its layers are divided over ranks.
        """
        if self._compute_dtype is not None:
            convert(self.module, self._compute_dtype)
        if self._names_of_parts is not None:
            names, state = self._state.names_now, self._state
            more = names.keys() - self._names_of_parts
            new = sorted(names[name] for name in more if not state.is_carried(name))
            if new:
                raise CaptureError(
                    f"The model has {', '.join(new[:5])}, which it had not when "
                    f"smp.DistributedModel wrapped it, and ranks share its tensors "
                    f"(tensor_parallel_degree): nobody has divided the new ones. Change the model "
                    f"before smp.DistributedModel, or set tensor_parallel_degree: 1."
                )
        if self.partitioned:
            self._backend.forget(self.module.parameters())

    def _when_placed(self) -> None:
        for copy in self._living_copies():
            copy.follow(self._backend.device)
        for optimizer in self._optimizers:
            optimizer.keep_local()
        if not self._is_single:
            self._run_partition_hooks()

    def _run_partition_hooks(self) -> None:
        hooks = list(self._partition_hooks.values())
        self._partition_hooks.clear()
        for hook in hooks:
            hook(self, self.first_optimizer())

    def begin_step(self) -> None:
        """Called before every step call of the session."""
        self._state.check_divided()
        self.given.warn_of_writes()
        if self._is_single and self._partition_hooks:
            self._run_partition_hooks()

    def end_step(self) -> None:
        """Called at the end of every step call that uses this model."""
        for copy in self._living_copies():
            copy.settle()
        for hook in list(self._step_hooks.values()):
            hook(self, self.first_optimizer())

    @property
    def divides_updates(self) -> bool:
        """Whether replicas share the work of optimizers."""
        return self._reducer.options.is_sharded or bool(self._state.gradient_shards)

    @property
    def store(self) -> ParameterStore:
        """Its parameters on this rank, and what optimizers hold of them."""
        return self._reducer.replica.store

    @property
    def last_run(self) -> Any:
        """State of the last step on this rank, whichever models it used. Extension."""
        return self._engine.last_run

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Lets `hook(state, bucket)` communicate gradients instead of mpxla, as in torch's DDP.

        `bucket` has the methods of `torch.distributed.GradBucket`; its tensors are on the host.
        The hook returns a `torch.futures.Future` of the reduced flat tensor. It has to average over
        `smp.get_dp_process_group()` and over microbatches by itself. It runs on a thread of its
        own, bucket after bucket. (SMP API reference, "register_comm_hook".)

        Args:
            state: handed to the hook.
            hook: called for every bucket, on all ranks in the same order.

        Raises:
            ConfigError: without `ddp` or `overlapping_allreduce`, with a reduction dtype, after the
                first training step, or a second time.
        """
        refuse_with_shards("model.register_comm_hook()", self._session.topology.tp_size)
        self._reducer.set_hook(state, hook, self._session.config.ddp)

    @contextlib.contextmanager
    def join(self) -> Generator[None]:
        """Around the training loop: lets replicas have different numbers of batches.

        Replicas that run out take part in the others' reductions with zeros: means stay means over
        all replicas, as in torch's DDP. At the end, all take over parameters, buffers and optimizer
        state of a replica that trained longest. All ranks must enter it; the ranks of one replica
        have equal numbers of batches. It covers steps of other models as well; entered for several
        (`with generator.join(), critic.join():`), it ends with the last. (SMP API reference,
        "join".)

        Raises:
            ConfigError: with `shard_optimizer_state`, a comm hook or a SyncBatchNorm.
        """
        refuse_with_divided_gradients("model.join()", self._state)
        refuse_with_shared_statistics(self.module)
        if self._session.topology.rdp_size == 1:
            yield
            return
        with self._models.joined(self._reducer):
            yield
