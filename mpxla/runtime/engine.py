"""One call of a step function, on every rank: announce, plan, run, collect.

Phases of a call: the first pipeline rank splits its inputs and announces the call's signature; all
ranks find or build the plan of that signature (a model's first plan places its parameters); each
rank runs its list of actions; gradients and results are collected.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from mpxla.errors import MpxlaError, PeerFailure, RankMismatch, StepError
from mpxla.graph.capture_attributes import Read
from mpxla.graph.indices import with_extremes
from mpxla.graph.placement import check_placement
from mpxla.graph.stepgraph import StepGraph, without_inputs
from mpxla.graph.user_code import at_user_line
from mpxla.log import get_logger
from mpxla.runtime.agreement import check_agreement, share_error
from mpxla.runtime.control import ControlChannel
from mpxla.runtime.executor import StepRun
from mpxla.runtime.identity import Identities
from mpxla.runtime.index_checks import IndexChecks
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.microbatch import SplitRule, split_arguments
from mpxla.runtime.model_watch import ModelView, ModelWatch
from mpxla.runtime.number_policy import NumberPolicy
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
from mpxla.runtime.plans import Plan, Plans
from mpxla.runtime.reduction import Reducers
from mpxla.runtime.runner import PlanRunner
from mpxla.runtime.seeds import draw_seed
from mpxla.runtime.signature import (
    Signature,
    describe_change,
    local_objects,
    portable,
    received,
    sign,
    with_constants,
)
from mpxla.runtime.state import ModelState
from mpxla.runtime.states import ModelStates
from mpxla.runtime.tracing import trace
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


_T = TypeVar("_T")


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
        self._plans = Plans()
        self._watch = ModelWatch(lambda: self._states.module)
        self._numbers = NumberPolicy()
        self._functions: dict[str, Identities] = {}
        self._model_counts: dict[str, int] = {}
        self._objects = Identities()
        self.first_cuts: dict[str, CutStep] = {}
        self.last_run: StepRun | None = None
        self.last_used: tuple[str, ...] = ()
        self.is_tracing = False
        self._known_to_all: BaseException | None = None

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

    def call(
        self,
        rule: SplitRule,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        lent: Set[str] = frozenset(),
    ) -> Any:
        """Runs one call of a step function. Every rank of the pipeline must call it.

        Args:
            rule: the function.
            args: its arguments.
            kwargs: likewise.
            lent: labels of models that have the values of a copy, which cannot be trained.

        Raises:
            StepError: the call cannot be carried out; raised on all ranks of the pipeline.
            PeerFailure: another rank failed during the call.
        """
        name = f"{rule.function.__module__}.{rule.function.__qualname__}"
        try:
            call = self._agree(name, rule, args, kwargs)
            if call.plan is None:
                with self._session.progress.busy("capture and compilation"):
                    call.plan = self._build(call.signature, rule.function, call.objects)
                self._agree_to_start(call, call.plan)
            if lent:
                self._refuse_training(name, call.plan, lent)
            return self._run(call.plan, call.tensors, call.seed)
        except (PeerFailure, _Announced):
            raise
        except BaseException as error:
            if error is not self._known_to_all:
                self._session.report_failure(f"step function {name}", error)
            raise

    def _refuse_training(self, name: str, plan: Plan, lent: Set[str]) -> None:
        trained = {p for stage in plan.runner.plan.cut.stages for p in stage.trained}
        if not self._states.owners(trained).isdisjoint(lent):
            text = f"{name} calls backward and was called with a copy of the distributed model"
            advice = "Copies are for evaluation; train the model itself."
            raise _announced(StepError(f"{text}{at_user_line()}. {advice}"))

    def _run(self, plan: Plan, tensors: list[list[torch.Tensor]], seed: int) -> Any:
        runner, signature = plan.runner, plan.signature
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
        problem = runner.problem_of_results(signature.function, count)
        if problem is not None:
            raise _announced(StepError(problem))  # all ranks of the pipeline see it
        return returned

    # --- meet ---------------------------------------------------------------------------------

    def meet(self, what: str, line: str) -> None:
        """Before something that the ranks of a pipeline do together outside of steps.

        The first rank announces it as it announces steps, so that all see who does something else.

        Args:
            what: the call, as in "model.state_dict()".
            line: the user's, as `at_user_line` gives it.

        Raises:
            RankMismatch: the first rank of the pipeline does something else.
        """
        if self._pp_rank == 0:
            self._control.announce((_MEETING, what, line))
            return
        with self._session.progress.meeting(what):
            kind, announced, *rest = self._control.follow()
        if announced == what:
            return
        first = f"{announced}{rest[0]}" if kind == _MEETING else f"the step function {announced}"
        raise RankMismatch(_apart(first, self._session.rank, self._pp_rank, f"{what}{line}", what))

    # --- announce -------------------------------------------------------------------------------

    def _agree(
        self, name: str, rule: SplitRule, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> "_Call":
        """The call as the first pipeline rank sees it, on all ranks."""
        if self._pp_rank > 0:
            return self._follow(name, args, kwargs)
        view = self._watch.look()
        try:
            count = self._session.config.microbatches
            parts = split_arguments(rule, args, kwargs, count)
            number = self._functions.setdefault(name, Identities()).number(rule.function)
            call = self._sign(_title(name, number), parts, view)
        except MpxlaError as error:
            self._control.announce(("error", name, type(error), str(error)))
            raise _announced(error) from None
        if call.plan is None:
            self._control.announce(("new", name, portable(call.signature)))
            return call
        problem = call.plan.runner.checks.problem_of_inputs(call.signature, call.tensors)
        if problem is not None:
            self._control.announce(("error", name, StepError, problem))
            raise _announced(StepError(problem))
        call.seed = self._draw_seed(call.plan.runner.plan)
        self._plans.use(call.plan.number)
        self._control.announce(("known", name, call.plan.number, call.seed))
        return call

    def _sign(self, title: str, parts: Sequence[Any], view: ModelView) -> "_Call":
        """Describes a call, with floats that have changed before as inputs, and finds its plan."""
        flags = view.modes, view.trainable

        def described() -> _Call:
            inputs = self._numbers.inputs(title)
            signature, tensors, objects = sign(title, parts, flags, self._objects, inputs)
            return _Call(signature, tensors, objects, self._plans.find(signature, view))

        call = described()
        if call.plan is None and self._numbers.learn(call.signature, self._known()):
            call = described()
        return call

    def _known(self) -> list[Signature]:
        """Signatures of all plans."""
        return [plan.signature for plan in self._plans]

    def _follow(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "_Call":
        kind, announced, *rest = self._control.follow()
        if kind == _MEETING:
            first, own = f"{announced}{rest[0]}", f"the step function {name}{at_user_line()}"
            text = _apart(first, self._session.rank, self._pp_rank, own, announced)
            raise RankMismatch(text)
        if announced != name:
            raise RankMismatch(
                f"pp_rank 0 calls the step function {announced} while rank {self._session.rank} "
                f"(pp_rank {self._pp_rank}) calls {name}. All ranks of a pipeline have to call the "
                f"same step functions in the same order."
            )
        if kind == "error":
            error_type, text = rest
            raise _announced(error_type(f"{text} (found on pp_rank 0)"))
        plan = self._plans.use(rest[0]) if kind == "known" else None
        signature = received(rest[0], args, kwargs) if plan is None else plan.signature
        view = self._watch.look()
        if signature.modes != view.modes:
            raise RankMismatch(
                f"{name}: the train/eval mode of the model on rank {self._session.rank} differs "
                f"from pp_rank 0. Call model.train() and model.eval() on all ranks, and make the "
                f"same models on all of them."
            )
        if signature.trainable != view.trainable:
            raise RankMismatch(
                f"{name}: requires_grad of the model's parameters on rank {self._session.rank} "
                f"differs from pp_rank 0. Freeze the same parameters on all ranks."
            )
        change = None if plan is None else plan.view.difference(view)
        if change is not None:
            raise RankMismatch(
                f"{name}: on rank {self._session.rank}, {change} since the step was captured, and "
                f"on pp_rank 0 it did not. Change the model in the same way on all ranks."
            )
        objects = local_objects(args, kwargs)
        return _Call(signature, [], objects, plan, 0 if plan is None else rest[1])

    def _draw_seed(self, plan: StepPlan) -> int:
        """A seed for the random operators of one call; 0 where there are none."""
        return draw_seed() if plan.is_random else 0

    def _agree_to_start(self, call: "_Call", plan: Plan) -> None:
        """What "known" tells with an announcement, for a plan that is new: the seed, or an error.

        Floats that the capture had to keep as constants are no tensors of the call any more.

        Raises:
            StepError: the inputs cannot be used; on all ranks of the pipeline.
        """
        constants = set(call.signature.numbers) - set(plan.signature.numbers)
        _, call.tensors = with_constants(call.signature, call.tensors, constants)
        if constants and self._pp_rank == 0:
            self._numbers.keep_constant(call.signature.function, constants)
        checks, step_plan = plan.runner.checks, plan.runner.plan
        if not (step_plan.is_random or checks.looks_at_inputs):
            return
        if self._pp_rank > 0:
            problem, call.seed = self._control.follow()
            if problem is not None:
                raise _announced(StepError(f"{problem} (found on pp_rank 0)"))
            return
        problem = checks.problem_of_inputs(plan.signature, call.tensors)
        call.seed = self._draw_seed(step_plan)
        self._control.announce((problem, call.seed))
        if problem is not None:
            raise _announced(StepError(problem))

    # --- plan -----------------------------------------------------------------------------------

    def _build(
        self, signature: Signature, function: Callable[..., Any], objects: Mapping[str, Any]
    ) -> Plan:
        started = time.perf_counter()
        reason = self._reason(signature)
        cut, signature, reads = self._cut_together(signature, function, objects)
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
        plan = self._together(
            self._group,
            f"step function {signature.function}",
            lambda: compile_stages(cut, schedule, self._pp_rank, device, is_for_speed),
        )
        self._link.prepare((*cut.forward, *cut.backward), cut.placement)
        reduction = self._reducers.prepare(cut, count) if cut.step.is_training else None
        checks = IndexChecks(self._session.config.check_indices, cut.step)
        states, models = self._states, tuple(used)
        runner = PlanRunner(
            plan, states, self._link, self._pp_rank, device, reduction, models, checks
        )
        view = self._watch.look().captured(states.module, reads)
        get_logger().info(
            "compiled step function %s in %.1f s (%s): %d programs on this rank",
            signature.function.rpartition(".")[2],
            time.perf_counter() - started,
            reason,
            sum(len(p.programs) for p in plan.programs.values()),
        )
        found = self._plans.add(signature, view, runner)
        self._forget_unused()
        return found

    def _forget_unused(self) -> None:
        """Lets go of objects and functions that no plan is for any more."""
        known = self._known()
        self._objects.keep({number for signature in known for number in signature.objects})
        titles = {signature.function for signature in known}
        for name, functions in self._functions.items():
            functions.keep([n for n in functions.numbers() if _title(name, n) in titles])
        self._watch.keep([plan.view for plan in self._plans])

    def _reason(self, signature: Signature) -> str:
        """Why a call needs a new program."""
        count = len(self._members)
        before = self._model_counts.get(signature.function, count)
        self._model_counts[signature.function] = count
        if before != count:  # their flags are part of every signature
            return "another model was made since"
        change = self._plans.model_change(signature, self._watch.look())
        if change is not None and self._pp_rank == 0:
            self._numbers.count_outside(signature.function, change)
        if change is not None:
            return change
        if self._pp_rank == 0:
            self._numbers.count(signature, self._known())
        return describe_change(signature, self._known())

    def _cut_together(
        self, signature: Signature, function: Callable[..., Any], objects: Mapping[str, Any]
    ) -> tuple[CutStep, Signature, list[Read]]:
        """`_cut` on all ranks; each raises its own error if it has one.

        The first step is cut by all replicas, later ones by the ranks of one pipeline.
        """
        world = self._session.topology.world_group()
        group = self._group if self._states.is_any_placed() else world
        what = f"step function {signature.function}"
        return self._together(group, what, lambda: self._cut(signature, function, objects))

    def _together(self, group: Sequence[int], what: str, work: Callable[[], _T]) -> _T:
        """Does something on all ranks of a group; if one of them fails, all raise.

        Where the group is all there is, every rank knows then, and the session can go on.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # the user's code may raise anything
            error = raised
        if tuple(group) == tuple(self._session.topology.world_group()):
            self._known_to_all = error
        share_error(self._session.objects, group, error, what)
        return cast(_T, result)

    def _cut(
        self, signature: Signature, function: Callable[..., Any], objects: Mapping[str, Any]
    ) -> tuple[CutStep, Signature, list[Read]]:
        """The step in stages, the signature that it serves, and what it read of the model."""
        self.is_tracing = True
        try:
            signature, step, reads = trace(signature, function, objects, self._states)
        finally:
            self.is_tracing = False
        step, config = self._without_other_models(step), self._session.config
        if config.check_indices == "all":
            step = with_extremes(step)
        if not (config.auto_partition or config.load_partition):
            names = self._states.current_names()
            check_placement(step, self._pins(), config.default_partition, names)
        cut = self._cut_captured(step, self.placement.ranks, self._measure(step))
        return cut, signature, reads

    def _pins(self) -> dict[str, int]:
        """Module path -> pipeline rank, of the modules that the user has placed."""
        pins: dict[str, int] = {}
        for label, member in self._members.items():
            path = self._states.path(label)
            pins.update(member.pins(f"model.{path}" if path else "model"))
        return pins

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
        config, stateful = self._session.config, self.placement.stateful
        return cut_step(step, config, self._pins(), fixed or None, stateful, measured_s)

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


_MEETING = "meeting"
"""Kind of an announcement of what is no step."""


@dataclass
class _Call:
    """One call of a step function on this rank.

    Attributes:
        signature: as the first pipeline rank describes it.
        tensors: tensor leaves of every microbatch, on the first pipeline rank.
        objects: this rank's own objects among the arguments, by path.
        plan: what runs it; None until it is captured.
        seed: from which the seeds of random programs are drawn.
    """

    signature: Signature
    tensors: list[list[torch.Tensor]]
    objects: dict[str, Any]
    plan: Plan | None
    seed: int = 0


class _Announced(MpxlaError):  # noqa: N818 - named for what happened, not for its kind
    """Marks an error that all ranks of the pipeline raise; nobody has to be told."""


def _apart(first: str, rank: int, pp_rank: int, own: str, what: str) -> str:
    """Text of the error of ranks that do not meet."""
    return (
        f"pp_rank 0 called {first}, while rank {rank} (pp_rank {pp_rank}) called {own}. All ranks "
        f"of a pipeline have to call {what}, since each holds a part of the model: call it "
        f"outside of `if smp.rank() == 0:`, and use the result on one rank."
    )


def _announced(error: MpxlaError) -> MpxlaError:
    """The same error, of a class that also is `_Announced`."""
    own = type(error)
    kind = cast(Any, type)(own.__name__, (own, _Announced), {"__module__": "mpxla.errors"})
    return kind(*error.args)


def _title(name: str, number: int) -> str:
    """Tells functions of one name apart."""
    return name if number == 0 else f"{name}#{number + 1}"
