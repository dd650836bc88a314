"""One call of a step function, on every rank: announce, plan, run, collect.

Phases of a call: the first pipeline rank splits its inputs and announces the call's signature; all
ranks find or build the plan of that signature (a model's first plan places its parameters); each
rank runs its list of actions; gradients and results are collected.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from mpxla.errors import MpxlaError, PeerFailure, RankMismatch
from mpxla.graph.capture import capture_step
from mpxla.graph.stepgraph import StepGraph, without_inputs
from mpxla.log import get_logger
from mpxla.runtime.agreement import check_agreement, share_error
from mpxla.runtime.control import ControlChannel
from mpxla.runtime.executor import StepRun
from mpxla.runtime.identity import Identities
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.microbatch import SplitRule, split_arguments
from mpxla.runtime.partition_store import write_decision
from mpxla.runtime.placement import Placement
from mpxla.runtime.plan import (
    CutStep,
    StepPlan,
    compile_stages,
    cut_step,
    describe_plan,
    schedule_step,
)
from mpxla.runtime.reduction import Reducers
from mpxla.runtime.runner import PlanRunner
from mpxla.runtime.seeds import draw_seed
from mpxla.runtime.signature import (
    Signature,
    describe_change,
    fill,
    local_objects,
    model_flags,
    sign,
)
from mpxla.runtime.state import ModelState
from mpxla.runtime.states import ModelStates
from mpxla.session import Session
from mpxla.stage.timing import measure_operators

__all__ = ["Member", "StepEngine"]


@dataclass(frozen=True)
class Member:
    """A model, as the engine knows it.

    Attributes:
        state: its parameters and buffers.
        pins: given where its module is, module path -> pipeline rank at the time of partitioning.
        on_placed: called once its parameters are on their ranks.
        measures_times: whether operators are timed before a step that uses it is partitioned.
    """

    state: ModelState
    pins: Callable[[str], Mapping[str, int]]
    on_placed: Callable[[], None]
    measures_times: bool = False


class StepEngine:
    """Runs step functions with the distributed models of a session.

    A model is placed when the first step that uses it runs; later steps follow where it lives.

    Args:
        session: configuration, topology and transport.
        link: messages between pipeline ranks.
        reducers: reductions of gradients over replicas.

    Attributes:
        placement: where parameters and buffers live.
        first_cuts: the first step that used a model, by the model's label.
        last_run: the last call on this rank.
        last_used: labels of the models that it used.
        is_tracing: whether a step function is being captured.
    """

    def __init__(self, session: Session, link: PipelineLink, reducers: Reducers):
        self._session = session
        self._states = ModelStates()
        self._members: dict[str, Member] = {}
        self._group = session.topology.pp_group(session.rank)
        self._pp_rank = session.topology.pp_rank(session.rank)
        self._link = link
        self._reducers = reducers
        self.placement = Placement(session, self._states, link, reducers)
        self._control = ControlChannel(session.transport, self._group)
        self._plans: dict[tuple[Any, ...], PlanRunner] = {}
        self._known: list[Signature] = []
        self._functions: dict[str, Identities] = {}
        self._model_counts: dict[str, int] = {}
        self._objects = Identities()
        self.first_cuts: dict[str, CutStep] = {}
        self.last_run: StepRun | None = None
        self.last_used: tuple[str, ...] = ()
        self.is_tracing = False

    def add(self, member: Member) -> str:
        """Takes in a model.

        Returns:
            Its label, by which it is named from then on.
        """
        label = self._states.add(member.state)
        self._members[label] = member
        return label

    def names_of(self, label: str) -> dict[str, str]:
        """The name in steps of each parameter and buffer of a model -> its name in the model."""
        return self._states.names_of(label)

    @property
    def first_cut(self) -> CutStep | None:
        """The first step that was cut."""
        return next(iter(self.first_cuts.values()), None)

    def call(self, rule: SplitRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs one call of a step function. Every rank of the pipeline must call it.

        Raises:
            StepError: the call cannot be carried out; raised on all ranks of the pipeline.
            PeerFailure: another rank failed during the call.
        """
        name = f"{rule.function.__module__}.{rule.function.__qualname__}"
        try:
            signature, tensors, objects, seed = self._agree(name, rule, args, kwargs)
            runner = self._plans.get(signature.key)
            if runner is None:
                with self._session.progress.busy():
                    runner = self._build(signature, rule.function, objects)
                seed = self._agree_on_seed(runner.plan)
            return self._run(runner, signature, tensors, seed)
        except (PeerFailure, _Announced):
            raise
        except BaseException as error:
            self._session.report_failure(f"step function {name}", error)
            raise

    def _reason(self, signature: Signature) -> str:
        """Why a call needs a new program."""
        count = len(self._members)
        before = self._model_counts.get(signature.function, count)
        self._model_counts[signature.function] = count
        if before != count:  # their flags are part of every signature
            return "another model was made since"
        return describe_change(signature, self._known)

    def _run(
        self,
        runner: PlanRunner,
        signature: Signature,
        tensors: list[list[torch.Tensor]],
        seed: int,
    ) -> Any:
        if self._session.lifeline is not None:
            self._session.lifeline.check()  # all messages may be there, and their sender gone
        recorder, progress = self._session.recorder, self._session.progress
        if recorder is not None:
            recorder.begin_step(signature.function, describe_plan(runner.plan, self._group))
        count = signature.num_microbatches
        returned, self.last_run = runner.run(tensors, count, seed, progress, recorder)
        self.last_used = runner.models
        if recorder is not None:
            recorder.end_step()
        return returned

    # --- announce -------------------------------------------------------------------------------

    def _agree(
        self, name: str, rule: SplitRule, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Signature, list[list[torch.Tensor]], dict[str, Any], int]:
        """Signature of the call, as the first pipeline rank sees it, on all ranks."""
        if self._pp_rank > 0:
            return self._follow(name, args, kwargs)
        try:
            count = self._session.config.microbatches
            parts = split_arguments(rule, args, kwargs, count)
            number = self._functions.setdefault(name, Identities()).number(rule.function)
            title = name if number == 0 else f"{name}#{number + 1}"
            signature, tensors, objects = sign(title, parts, self._states.module, self._objects)
        except MpxlaError as error:
            self._control.announce(("error", name, type(error), str(error)))
            raise _announced(error) from None
        runner = self._plans.get(signature.key)
        if runner is None:
            self._control.announce(("new", name, signature))
            return signature, tensors, objects, 0
        seed = self._draw_seed(runner.plan)
        self._control.announce(("known", name, self._known.index(signature), seed))
        return signature, tensors, objects, seed

    def _follow(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Signature, list[list[torch.Tensor]], dict[str, Any], int]:
        kind, announced, *rest = self._control.follow()
        if announced != name:
            raise RankMismatch(
                f"pp_rank 0 calls the step function {announced} while rank {self._session.rank} "
                f"(pp_rank {self._pp_rank}) calls {name}. All ranks of a pipeline have to call the "
                f"same step functions in the same order."
            )
        if kind == "error":
            error_type, text = rest
            raise _announced(error_type(f"{text} (found on pp_rank 0)"))
        signature = rest[0] if kind == "new" else self._known[rest[0]]
        modes, trainable = model_flags(self._states.module)
        if signature.modes != modes:
            raise RankMismatch(
                f"{name}: the train/eval mode of the model on rank {self._session.rank} differs "
                f"from pp_rank 0. Call model.train() and model.eval() on all ranks, and make the "
                f"same models on all of them."
            )
        if signature.trainable != trainable:
            raise RankMismatch(
                f"{name}: requires_grad of the model's parameters on rank {self._session.rank} "
                f"differs from pp_rank 0. Freeze the same parameters on all ranks."
            )
        objects = local_objects(args, kwargs)
        return signature, [], objects, rest[1] if kind == "known" else 0

    def _draw_seed(self, plan: StepPlan) -> int:
        """A seed for the random operators of one call; 0 where there are none."""
        return draw_seed() if plan.is_random else 0

    def _agree_on_seed(self, plan: StepPlan) -> int:
        if not plan.is_random:
            return 0
        if self._pp_rank > 0:
            return self._control.follow()
        seed = self._draw_seed(plan)
        self._control.announce(seed)
        return seed

    # --- plan -----------------------------------------------------------------------------------

    def _build(
        self, signature: Signature, function: Callable[..., Any], objects: Mapping[str, Any]
    ) -> PlanRunner:
        started = time.perf_counter()
        reason = self._reason(signature)
        cut = self._cut_together(signature, function, objects)
        used = self._models_of(cut)
        new = [label for label in used if not self._states[label].is_placed]
        if new:
            cut = self._follow_first_replica(cut, signature.function, new)
        what = "captured another step"
        check_agreement(self._session.objects, self._group, cut.description(), what)
        if new:
            self._settle(self.placement.of_new(cut, new), new)
        if not self.first_cuts:
            self._write_decision(cut)
        for label in used:
            self.first_cuts.setdefault(label, cut)
        self.placement.provide_missing(cut)
        self.placement.note_changes(cut)
        count, device = signature.num_microbatches, self._session.device
        schedule = schedule_step(cut, self._session.config)
        is_for_speed = self._session.config.optimize == "speed"
        plan = compile_stages(cut, schedule, self._pp_rank, device, is_for_speed)
        self._link.prepare((*cut.forward, *cut.backward), cut.placement)
        reduction = self._reducers.prepare(cut, count) if cut.step.is_training else None
        runner = PlanRunner(
            plan, self._states, self._link, self._pp_rank, device, reduction, tuple(used)
        )
        self._plans[signature.key] = runner
        self._known.append(signature)
        get_logger().info(
            "compiled step function %s in %.1f s (%s): %d programs on this rank",
            signature.function.rpartition(".")[2],
            time.perf_counter() - started,
            reason,
            sum(len(p.programs) for p in plan.programs.values()),
        )
        return runner

    def _cut_together(
        self, signature: Signature, function: Callable[..., Any], objects: Mapping[str, Any]
    ) -> CutStep:
        """`_cut` on all ranks; each raises its own error if it has one.

        The first step is cut by all replicas, later ones by the ranks of one pipeline.
        """
        cut, error = None, None
        try:
            cut = self._cut(signature, function, objects)
        except Exception as raised:  # the user's code may raise anything
            error = raised
        world = self._session.topology.world_group()
        group = self._group if self._states.is_any_placed() else world
        share_error(self._session.objects, group, error, f"step function {signature.function}")
        assert cut is not None
        return cut

    def _cut(
        self, signature: Signature, function: Callable[..., Any], objects: Mapping[str, Any]
    ) -> CutStep:
        def run(leaves: Sequence[torch.Tensor]) -> Any:
            args, kwargs = fill(signature, leaves, objects)
            return function(*args, **kwargs)

        self.is_tracing = True
        try:
            with torch.set_grad_enabled(signature.grad_enabled):
                step = capture_step(
                    run, self._states.module, signature.tensor_leaves, self._states.canonical_names
                )
        finally:
            self.is_tracing = False
        step = self._without_other_models(step)
        return self._cut_captured(step, self.placement.ranks, self._measure(step))

    def _without_other_models(self, step: StepGraph) -> StepGraph:
        """The step without the parameters and buffers of models that it does not use."""
        labels = self._states.labels
        if len(labels) == 1:
            return step
        used = self._states.owners(step.names_in_use())
        others = [label for label in labels if label not in used]
        return without_inputs(step, {n for one in others for n in self._states.names_of(one)})

    def _cut_captured(
        self,
        step: StepGraph,
        fixed: Mapping[str, tuple[int, ...]],
        measured_s: Mapping[str, float] | None = None,
    ) -> CutStep:
        pins: dict[str, int] = {}
        for label, member in self._members.items():
            path = self._states.path(label)
            pins.update(member.pins(f"model.{path}" if path else "model"))
        config, stateful = self._session.config, self.placement.stateful
        return cut_step(step, config, pins, fixed or None, stateful, measured_s)

    def _measure(self, step: StepGraph) -> dict[str, float] | None:
        """Seconds of the step's operators, the same on all ranks of the pipeline."""
        if not any(member.measures_times for member in self._members.values()):
            return None
        if self._pp_rank > 0:
            return self._control.follow()
        measured_s = measure_operators(step, self._session.device)
        self._control.announce(measured_s)
        return measured_s

    def _write_decision(self, cut: CutStep) -> None:
        config = self._session.config
        if self._session.rank == 0 and config.partition_file and not config.load_partition:
            write_decision(config, cut.problem, cut.partition)

    # --- models ---------------------------------------------------------------------------------

    def _models_of(self, cut: CutStep) -> list[str]:
        """Labels of the models that a step reads; there always is one.

        A model that owns no parameter or buffer goes with the next step. Who owns what another one
        shares is used with it.
        """
        read = self._states.owners(cut.parameter_ranks())
        labels = self._states.labels
        used = [n for n in labels if n in read or not self._states.names_of(n)]
        return self._states.closure(used or labels[:1])

    def _follow_first_replica(self, cut: CutStep, function: str, new: Sequence[str]) -> CutStep:
        """The step cut so that new models live where the first replica puts them.

        Batches of other shapes (other sequence lengths) may have led this replica elsewhere.
        """
        objects, world = self._session.objects, self._session.topology.world_group()
        model = [f"the first step function is {function}", *self._states.description(new)]
        check_agreement(objects, world, model, "have another model or script")
        ranks = self.placement.of_new(cut, new)
        first = objects.allgather(ranks, world)[0]
        if ranks == first:
            return cut
        return self._cut_captured(cut.step, {**self.placement.ranks, **first})

    def _settle(self, ranks: Mapping[str, tuple[int, ...]], labels: Iterable[str]) -> None:
        for label in labels:
            self.placement.settle(label, ranks)
            self._members[label].on_placed()

    def adopt_single_stage(self, label: str) -> None:
        """Places all of a model here; used at construction when there is only one stage."""
        world = self._session.topology.world_group()
        model = self._states.description([label])
        check_agreement(self._session.objects, world, model, "have another model")
        self._settle(dict.fromkeys(self._states.names_of(label), (0,)), [label])


class _Announced(MpxlaError):  # noqa: N818 - named for what happened, not for its kind
    """Marks an error that all ranks of the pipeline raise; nobody has to be told."""


def _announced(error: MpxlaError) -> MpxlaError:
    """The same error, of a class that also is `_Announced`."""
    own = type(error)
    kind = cast(Any, type)(own.__name__, (own, _Announced), {"__module__": "mpxla.errors"})
    return kind(*error.args)
