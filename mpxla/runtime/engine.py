"""One call of a step function, on every rank: agree, plan, run, collect.

Phases of a call: the first pipeline rank splits its inputs and announces the call's signature; all
ranks find or build the plan of that signature (a model's first plan places its parameters); each
rank runs its list of actions; gradients and results are collected.
"""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, TypeVar, cast

from mpxla.collection import give_back_memory
from mpxla.comm.agreement import check_agreement, share_error
from mpxla.comm.transport import Members
from mpxla.errors import PeerFailure, RankMismatch, StepError
from mpxla.graph.alike import lines_of
from mpxla.graph.collectives import REPLICA_GROUP, TENSOR_GROUP
from mpxla.graph.python.plain import Read
from mpxla.graph.python.questions import told_by_buffers
from mpxla.graph.python.rewritten import Rewritten
from mpxla.graph.stepgraph import StepGraph
from mpxla.graph.user_code import at_user_line
from mpxla.log import get_logger
from mpxla.runtime.arrivals import Arrivals
from mpxla.runtime.asking import whole_way
from mpxla.runtime.call import Call, left_flags, trained_by
from mpxla.runtime.calls import Calls
from mpxla.runtime.constants import Constants
from mpxla.runtime.control import AnnouncedError, as_announced
from mpxla.runtime.executor import StepRun
from mpxla.runtime.index_checks import IndexChecks
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.microbatch import SplitRule, num_samples, split_arguments
from mpxla.runtime.outputs import Part
from mpxla.runtime.passes import CallRunner
from mpxla.runtime.placement import Placement
from mpxla.runtime.plans.cache import Plan
from mpxla.runtime.plans.cut import CutStep
from mpxla.runtime.plans.cutting import StepCutter
from mpxla.runtime.plans.kept_steps import KeptSteps
from mpxla.runtime.plans.partition_store import write_decision
from mpxla.runtime.plans.plan import StepPlan, compile_stages, describe_plan
from mpxla.runtime.plans.scheduling import schedule_step
from mpxla.runtime.reduction import Reducers
from mpxla.runtime.rewriting import write_back
from mpxla.runtime.runner import Gathering, PlanRunner
from mpxla.runtime.signature import Signature
from mpxla.runtime.states import Member, ModelStates
from mpxla.runtime.step_writes import StepWrites, set_derived
from mpxla.runtime.watching.metrics import Meter
from mpxla.runtime.watching.sign_of_life import SignOfLife
from mpxla.session import Session
from mpxla.stage.flat import SHARDING_GROUP
from mpxla.stage.making import graphs_made_quickly

__all__ = ["StepEngine"]


_T = TypeVar("_T")
_SAME_STEP = (
    "What the step function reads outside of its arguments (tensors, random numbers of Python, the "
    "rank) has to be equal on all ranks that share tensors: make it from one seed, or pass it as "
    "an argument."
)


class StepEngine:
    """Runs step functions with the distributed models of a session.

    A model is placed when the first step that uses it runs; later steps follow where it lives.

    Attributes:
        calls: how the ranks agree on calls, and the plans that are known.
        placement: where parameters and buffers live.
        arrivals: what models have that is not placed yet.
        first_cuts: the first step that used a model, by the model's label.
        last_run: the last call on this rank.
        last_used: labels of the models that it used.
        meter: counts what calls take.
        life: says what a compilation is doing.
    """

    def __init__(self, session: Session, link: PipelineLink, reducers: Reducers):
        self._session = session
        self._states = ModelStates()
        self._members: dict[str, Member] = {}
        self._group = session.topology.pp_group(session.rank)
        self._replica = session.topology.mp_group(session.rank)
        self._pp_rank = session.topology.pp_rank(session.rank)
        sharing = session.topology.tp_group(session.rank)
        sharding = session.topology.sdp_group(session.rank)
        replicas = session.topology.rdp_group(session.rank)
        self._groups = {
            TENSOR_GROUP: Members(sharing, session.transport),
            SHARDING_GROUP: Members(sharding, session.transport),
            REPLICA_GROUP: Members(replicas, session.transport),
        }
        self._link = link
        self._reducers = reducers
        self.placement = Placement(session, self._states, link, reducers)
        self.calls = Calls(session, lambda: self._states.module)
        self.first_cuts: dict[str, CutStep] = {}
        self._trained_by: set[str] = set()
        self.last_run: StepRun | None = None
        self.last_used: tuple[str, ...] = ()
        backend, transport = session.backend, session.transport
        self._place = sharing.index(session.rank)
        # Each replica brings a batch to a step, or each of its ranks that share tensors does.
        self._num_batches = 1 if session.config.prescaled_batch else len(sharing)
        config = session.config.for_batches(self._num_batches)
        num_batches = len(replicas) * self._num_batches
        self._constants = Constants(backend)
        self.meter = Meter(backend, transport, num_batches)
        self._runner = CallRunner(self._states, reducers, backend, self._describe, session.progress)
        self.life = SignOfLife(get_logger().info if session.rank == 0 else None)
        self._samples: dict[int, int | None] = {}
        self._known_to_all: BaseException | None = None
        self._compared: set[str] = set()
        """Names of step functions whose messages were compared."""
        self._kept = KeptSteps(session.kept, session.backend)
        self._cutter = StepCutter(
            session,
            self._kept,
            self._states,
            self._members,
            self.placement,
            self.calls.control,
            self.life,
            config,
        )
        self.arrivals = Arrivals(
            session, self._states, self._members, self.placement, reducers, self._cutter
        )

    def add(self, member: Member) -> str:
        """Takes in a model; gives the label by which it is named from then on."""
        label = self._states.add(member.state)
        self._members[label] = member
        return label

    def names_of(self, label: str) -> dict[str, str]:
        """The name in steps of each parameter and buffer of a model -> its name in the model."""
        return self._states.names_of(label)

    @property
    def is_tracing(self) -> bool:
        """Whether a step function is being captured."""
        return self._cutter.is_tracing

    def call(
        self,
        rule: SplitRule,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        lent: Set[str] = frozenset(),
    ) -> Any:
        """Runs one call of a step function. Every rank of the pipeline must call it.

        Models that are `lent` have the values of a copy, and cannot be trained.

        Raises:
            StepError: the call cannot be carried out; raised on all ranks of the pipeline.
            PeerFailure: another rank failed during the call.
        """
        give_back_memory()  # of the last call and of the update after it
        name = f"{rule.function.__module__}.{rule.function.__qualname__}"
        self._session.progress.function = rule.function.__qualname__
        try:
            call = self.calls.agree(name, rule, args, kwargs)
            self._prepare(call, rule, lent)
            result = self._run_counted(call, rule, args, kwargs, lent)
            set_derived(call.passes[-1].plan.view)
            return result
        except (PeerFailure, AnnouncedError):
            raise
        except BaseException as error:
            if error is not self._known_to_all:
                self._session.report_failure(f"step function {name}", error)
            raise

    def _prepare(self, call: Call, rule: SplitRule, lent: Set[str]) -> None:
        """Asks, captures and compiles until there is a plan for what runs next of a call."""
        while not call.passes:
            if call.question is not None:
                self.calls.answer(call, self._runner.ask(call.question, call.seed))
                continue
            work = f"compiling step function {rule.function.__qualname__}"
            with (
                self._session.progress.busy("capture and compilation"),
                self.life.during(work, "capture"),
                graphs_made_quickly(),
            ):
                plan = self._build(call, rule.function)
            self.calls.agree_to_start(call, plan)
        if lent and not self._states.owners(trained_by(call.passes)).isdisjoint(lent):
            text = f"{call.name} calls backward and was called with a copy of the distributed model"
            advice = "Copies are for evaluation; train the model itself."
            raise as_announced(StepError(f"{text}{at_user_line()}. {advice}"))

    def _run_counted(
        self,
        call: Call,
        rule: SplitRule,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        lent: Set[str],
    ) -> Any:
        """Runs a call, and notes what it took."""
        plan = call.passes[0].plan
        if self._pp_rank == 0 and plan.number not in self._samples:
            self._samples[plan.number] = num_samples(rule, args, kwargs)
        began = time.perf_counter()
        parts, runs = self._run(call)
        passes = call.passes
        while not call.is_last:
            self.calls.go_on(call)
            self._prepare(call, rule, lent)
            more, later = self._run(call)
            parts, runs, passes = [*parts, *more], [*runs, *later], [*passes, *call.passes]
        self._states.set_flags(left_flags(passes), lent)
        for one in passes:
            for read in one.plan.written:
                if one is passes[-1] or not read.is_of_tensors:
                    read.leave()
        own_count = call.signature.num_microbatches // self._num_batches
        first = self._place % self._num_batches * own_count
        returned = self._runner.outputs(parts, slice(first, first + own_count))
        if isinstance(returned, Rewritten):
            returned = write_back(returned, split_arguments(rule, args, kwargs, own_count))
        is_training = any(one.plan.cut.step.is_training for one in call.passes)
        self.meter.note_call(
            plan.signature.function.rpartition(".")[2],
            is_training,
            (began, time.perf_counter()),
            sum(run.values.wait_s for run in runs),
            self._samples.get(plan.number),
        )
        every = self._session.config.log_metrics_every
        if is_training and every and self._session.rank == 0 and self.meter.num_steps % every == 0:
            get_logger().info("%s", self.meter.line())
        return returned

    def status(self) -> dict[str, Any]:
        """What this rank does and its metrics, as plain data; for other threads."""
        running = "in a step" if self._session.progress.is_running else "outside of steps"
        return {"state": self.life.what or running, **self.meter.read()}

    def _run(self, call: Call) -> tuple[list[Part], list[StepRun]]:
        if self._session.lifeline is not None:
            self._session.lifeline.check()  # all messages may be there, and their sender gone
        passes = call.passes
        parts, found = self._runner.run(call, self._session.recorder)
        self.last_run = found[-1].run
        used = (label for one in passes for label in one.plan.runner.models)
        self.last_used = tuple(dict.fromkeys(used))
        for one, ran in zip(passes, found, strict=True):
            problem = one.plan.runner.problem_of_results(call.signature.function, ran)
            if problem is not None:
                raise as_announced(StepError(problem))  # all ranks of the pipeline see it
        self._runner.leave(parts)
        return parts, [ran.run for ran in found]

    def _describe(self, plan: StepPlan) -> dict[str, object]:
        return describe_plan(plan, self._group, self._pp_rank, self._cutter.machine)

    # --- plan -----------------------------------------------------------------------------------

    def _build(self, call: Call, function: Callable[..., Any]) -> Plan:
        started = time.perf_counter()
        reason = self.calls.reason(call, len(self._members))
        self._together(f"step function {call.name}", self.arrivals.take_in, is_long=False)
        if self._states.is_any_placed():
            self.arrivals.meet_new()
        else:
            self._cutter.settle_rates()
        cut, signature, reads = self._cut_together(call, function)
        question = cut if cut.step.is_question else None
        if question is not None and self.placement.unsettled(self._models_of(cut)):
            cut = self._whole(cut, replace(call, signature=signature), function)
        if self._cutter.chosen is None and not self._states.is_any_placed():
            cut = self._choose(cut, signature.function)
        used = self._models_of(cut)
        new, unread = self.placement.unsettled(used), self.placement.unread(cut)
        if new or unread:
            cut = self.arrivals.follow_first_replica(cut, signature.function, [*new, *unread])
        everyone = self._session.objects, self._group
        check_agreement(*everyone, cut.description(), "captured another step")
        self._compare_captured(cut.step)
        self.arrivals.settle(self.placement.of_new(cut, new), used)
        if new or (cut.step.is_training and signature.function not in self._trained_by):
            self.arrivals.settle_copies(cut)  # together with all replicas
            self._trained_by.add(signature.function)
        self.placement.move(self.placement.of_new(cut, unread))
        if not self.first_cuts:
            self._write_decision(cut)
        for label in used:
            self.first_cuts.setdefault(label, cut)
        self.placement.provide_missing(cut)
        self.placement.note_changes(cut)
        if question is not None and question is not cut:
            cut = self._cutter.cut_captured(question.step, saved=question.saved or None)
        count, backend = signature.num_microbatches, self._session.backend
        config = self._cutter.config
        schedule = schedule_step(cut, config)
        shards = self._states.shards
        gathers_once = bool(shards) and self._cutter.gathers_once(cut)
        is_for_speed = config.optimize == "speed"
        plan = self._together(
            f"step function {signature.function}",
            lambda: compile_stages(
                cut,
                schedule,
                self._pp_rank,
                backend,
                is_for_speed,
                config.activation_memory,
                self._groups,
                {} if gathers_once else shards,
                self._states.gradient_shards,
                config.sdp_max_live_parameters,
                self.life.at,
                self._kept,
            ),
        )
        if call.name not in self._compared:
            self._compare_messages(plan)
            self._compared.add(call.name)
        gathering = None
        if gathers_once:
            read = {n for p in plan.programs.values() for n in p.lowered.spec.parameters}
            gathering = Gathering(read, shards, self._groups[SHARDING_GROUP], backend)
        exchanges = self._settle_exchanges(plan, gathering)
        self._link.prepare((*cut.forward, *cut.backward), cut.placement)
        reduction = None
        if cut.step.is_training:
            scaled = [f"scales rows of {name}" for name in cut.step.scaled_tables]
            reduction = self._reducers.prepare([cut], count, [*plan.exchanges(), *scaled])
        replicas = self._groups[REPLICA_GROUP].ranks
        runner = PlanRunner(
            plan,
            self._states,
            self._link,
            self._pp_rank,
            backend,
            reduction,
            tuple(used),
            IndexChecks(config.check_indices, cut.step, backend),
            StepWrites(cut.step, self._states, backend, self._session.objects, replicas),
            self._constants,
            self._session.objects,
            self._group,
            gathering,
        )
        self.meter.note_compilation(time.perf_counter() - started)
        get_logger().info(
            "compiled step function %s in %.1f s (%s): %d programs on this rank",
            signature.function.rpartition(".")[2],
            time.perf_counter() - started,
            reason,
            sum(len(p.programs) for p in plan.programs.values()),
        )
        return self.calls.keep(signature, reads, runner, exchanges)

    def _compare_captured(self, step: StepGraph) -> None:
        """Checks that ranks which share tensors have captured the same step."""
        ranks = self._groups[TENSOR_GROUP].ranks
        if len(ranks) > 1:
            what = "share the tensors of a model, and captured another step"
            check_agreement(self._session.objects, ranks, lines_of(step), what, _SAME_STEP)

    def _compare_messages(self, plan: StepPlan) -> None:
        """Checks that ranks which share tensors exchange the same in their programs.

        Only with the first plan of a step function, which all of them build in the same call. Later
        ones need not: a replica with another length of sequences builds one by itself.
        """
        what, ranks = "have other collectives in their programs", self._groups[TENSOR_GROUP].ranks
        check_agreement(self._session.objects, ranks, plan.messages(TENSOR_GROUP), what)

    def _settle_exchanges(self, plan: StepPlan, gathering: Gathering | None) -> list[str]:
        """What all ranks of the pipeline gather and scatter, compared with other replicas."""
        if len(self._groups[REPLICA_GROUP].ranks) == 1:
            return []
        once = gathering.names if gathering is not None else ()
        own = [*(f"the begin of the step gathers {name}" for name in once), *plan.exchanges()]
        everyone = self._session.objects.allgather(own, self._group)
        exchanges = [line for lines in everyone for line in lines]
        if not exchanges and len(self._groups[SHARDING_GROUP].ranks) == 1:
            return []  # another replica need not compile now

        def settle() -> None:
            if self._pp_rank > 0:
                return
            try:
                self.calls.sharded.settle(exchanges)
            except RankMismatch as error:  # as the other replicas know
                raise as_announced(error) from None

        self._together("what ranks gather", settle)
        return exchanges

    def _whole(self, cut: CutStep, call: Call, function: Callable[..., Any]) -> CutStep:
        """A step by which new models are placed, where its capture has ended with a question."""

        def told(question: StepGraph) -> int | None:
            found = told_by_buffers(question, self._states.tensor)
            return self._session.objects.allgather(found, self._replica)[0]

        def cut_again(one: Call) -> CutStep:
            return self._cut_together(one, function, self._replica)[0]

        return whole_way(cut, call, told, cut_again) or cut

    def _cut_together(
        self, call: Call, function: Callable[..., Any], group: Sequence[int] = ()
    ) -> tuple[CutStep, Signature, list[Read]]:
        """The step cut on all ranks; each raises its own error if it has one.

        The first step is cut by all replicas, later ones by the ranks of one replica.
        """
        world = self._session.topology.world_group()
        group = group or (self._replica if self._states.is_any_placed() else world)
        what = f"step function {call.signature.function}"
        return self._together(what, lambda: self._cutter.cut(call, function), group)

    def _together(
        self, what: str, work: Callable[[], _T], group: Sequence[int] = (), is_long: bool = True
    ) -> _T:
        """Does something on all ranks of a group, or of this replica; if one fails, all raise.

        Where the group is all there is, every rank knows then, and the session can go on.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # the user's code may raise anything
            error = raised
        group = group or self._replica  # those that share tensors find the same errors
        if tuple(group) == tuple(self._session.topology.world_group()):
            self._known_to_all = error
        if is_long:
            self.life.at("done here, waiting for other ranks")
        share_error(self._session.objects, group, error, what)
        return cast(_T, result)

    def _choose(self, cut: CutStep, function: str) -> CutStep:
        """The step cut anew if keys of the configuration were open.

        Later steps keep to what was chosen, and so do other replicas (`Arrivals`).
        """
        if not self._cutter.may_choose(cut):
            return cut
        # Only ranks that cut the same step listen to each other.
        everyone = self._session.objects, self._group
        check_agreement(*everyone, cut.description(), "captured another step")
        measured_s = self._cutter.choose(cut)
        if not self._cutter.chosen:
            return cut
        return self._together(
            f"step function {function}",
            lambda: self._cutter.cut_captured(cut.step, measured_s, cut.saved or None),
        )

    def _write_decision(self, cut: CutStep) -> None:
        config = self._cutter.config
        if self._session.rank == 0 and config.partition_file and not config.load_partition:
            write_decision(config, cut.problem, cut.partition)

    def _models_of(self, cut: CutStep) -> list[str]:
        """Labels of the models that a step reads; there always is one.

        A model that owns no parameter or buffer goes with the next step. Who owns what another one
        shares is used with it.
        """
        read = self._states.owners(cut.parameter_ranks())
        labels = self._states.labels
        used = [n for n in labels if n in read or not self._states.names_of(n)]
        return self._states.closure(used or labels[:1])
