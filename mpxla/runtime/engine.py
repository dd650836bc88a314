"""One call of a step function, on every rank: announce, plan, run, collect.

Phases of a call: the first pipeline rank splits its inputs and announces the call's signature; all
ranks find or build the plan of that signature (the first plan places the parameters); each rank
runs its list of actions; gradients and results are collected.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from mpxla.errors import MpxlaError, PeerFailure, RankMismatch, StepError
from mpxla.graph.capture import capture_step
from mpxla.graph.stepgraph import StepGraph
from mpxla.graph.user_code import at_user_line
from mpxla.log import get_logger
from mpxla.runtime.agreement import check_agreement, share_error
from mpxla.runtime.control import ControlChannel
from mpxla.runtime.executor import StepRun
from mpxla.runtime.identity import Identities
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.microbatch import SplitRule, split_arguments
from mpxla.runtime.partition_store import cut_settings, write_decision
from mpxla.runtime.plan import (
    CutStep,
    StepPlan,
    compile_stages,
    cut_step,
    describe_plan,
    schedule_step,
)
from mpxla.runtime.reduction import Reducer
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
from mpxla.session import Session
from mpxla.stage.spec import TensorSpec
from mpxla.stage.timing import measure_operators

__all__ = ["StepEngine"]


class StepEngine:
    """Runs step functions for one distributed model.

    Args:
        session: configuration, topology and transport.
        state: the model's parameters and buffers.
        pins: gives module path -> pipeline rank at the time of partitioning.
        on_placed: called once parameters are on their ranks.
        make_reducer: makes the reduction of gradients over replicas.
        measures_times: whether operators are timed before a step is partitioned.
    """

    def __init__(
        self,
        session: Session,
        state: ModelState,
        pins: Callable[[], Mapping[str, int]],
        on_placed: Callable[[], None],
        make_reducer: Callable[[PipelineLink], Reducer],
        measures_times: bool = False,
    ):
        self._session = session
        self._state = state
        self._pins = pins
        self._on_placed = on_placed
        self._measures_times = measures_times
        self._group = session.topology.pp_group(session.rank)
        self._pp_rank = session.topology.pp_rank(session.rank)
        self._link = PipelineLink(session.transport, self._group, session.device)
        self._reducer = make_reducer(self._link)
        self._control = ControlChannel(session.transport, self._group)
        self._plans: dict[tuple[Any, ...], PlanRunner] = {}
        self._known: list[Signature] = []
        self._functions: dict[str, Identities] = {}
        self._objects = Identities()
        self._parameter_ranks: dict[str, tuple[int, ...]] = {}
        self._stateful: frozenset[str] = frozenset()
        self.last_run: StepRun | None = None
        self.first_cut: CutStep | None = None
        self.is_tracing = False

    def call(
        self,
        rule: SplitRule,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_lent: bool = False,
    ) -> Any:
        """Runs one call of a step function. Every rank of the pipeline must call it.

        Args:
            rule: the function.
            args: its arguments.
            kwargs: likewise.
            is_lent: whether the model has the values of a copy, which cannot be trained.

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
            if is_lent and runner.plan.cut.step.is_training:
                text = f"{name} calls backward and was called with a copy of the distributed model"
                advice = "Copies are for evaluation; train the model itself."
                raise _announced(StepError(f"{text}{at_user_line()}. {advice}"))
            return self._run(runner, signature, tensors, seed)
        except (PeerFailure, _Announced):
            raise
        except BaseException as error:
            self._session.report_failure(f"step function {name}", error)
            raise

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
        if recorder is not None:
            recorder.end_step()
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
    ) -> tuple[Signature, list[list[torch.Tensor]], dict[str, Any], int]:
        """Signature of the call, as the first pipeline rank sees it, on all ranks."""
        if self._pp_rank > 0:
            return self._follow(name, args, kwargs)
        try:
            count = self._session.config.microbatches
            parts = split_arguments(rule, args, kwargs, count)
            number = self._functions.setdefault(name, Identities()).number(rule.function)
            title = name if number == 0 else f"{name}#{number + 1}"
            signature, tensors, objects = sign(title, parts, self._state.module, self._objects)
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
        signature = rest[0] if kind == "new" else self._known[rest[0]]
        modes, trainable = model_flags(self._state.module)
        if signature.modes != modes:
            raise RankMismatch(
                f"{name}: the train/eval mode of the model on rank {self._session.rank} differs "
                f"from pp_rank 0. Call model.train() and model.eval() on all ranks."
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
        reason = describe_change(signature, self._known)
        cut = self._cut_together(signature, function, objects)
        if not self._state.is_placed:
            cut = self._follow_first_replica(cut, signature.function)
        what = "captured another step"
        check_agreement(self._session.objects, self._group, cut.description(), what)
        if not self._state.is_placed:
            self._settle(_with_unused(cut, self._state, self._parameter_ranks))
        if self.first_cut is None:
            self.first_cut = cut
            self._write_decision(cut)
        self._provide_missing(cut)
        self._note_changes(cut)
        count, device = signature.num_microbatches, self._session.device
        schedule = schedule_step(cut, self._session.config)
        is_for_speed = self._session.config.optimize == "speed"
        plan = compile_stages(cut, schedule, self._pp_rank, device, is_for_speed)
        self._link.prepare((*cut.forward, *cut.backward), cut.placement)
        reduction = self._reducer.prepare(cut) if cut.step.is_training else None
        scale = self._reducer.objective_scale(count)
        runner = PlanRunner(plan, self._state, self._link, self._pp_rank, device, reduction, scale)
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
        group = self._group if self._state.is_placed else world
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
                    run, self._state.module, signature.tensor_leaves, self._state.canonical_names
                )
        finally:
            self.is_tracing = False
        fixed = self._parameter_ranks or None
        measured_s = self._measure(step)
        return cut_step(step, self._session.config, self._pins(), fixed, self._stateful, measured_s)

    def _measure(self, step: StepGraph) -> dict[str, float] | None:
        """Seconds of the step's operators, the same on all ranks of the pipeline."""
        if not self._measures_times:
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

    def _follow_first_replica(self, cut: CutStep, function: str) -> CutStep:
        """The step cut so that parameters live where the first replica puts them.

        Batches of other shapes (other sequence lengths) may have led this replica elsewhere.
        """
        objects, world = self._session.objects, self._session.topology.world_group()
        model = [f"the first step function is {function}", *self._state.description()]
        check_agreement(objects, world, model, "have another model or script")
        ranks = _with_unused(cut, self._state, self._parameter_ranks)
        first = objects.allgather(ranks, world)[0]
        if ranks == first:
            return cut
        return cut_step(cut.step, self._session.config, self._pins(), first, self._stateful)

    def _settle(self, parameter_ranks: dict[str, tuple[int, ...]]) -> None:
        self._parameter_ranks = parameter_ranks
        local = {n for n, ranks in parameter_ranks.items() if self._pp_rank in ranks}
        self._state.place(local, self._session.device)
        self._reducer.equalize(self._parameter_ranks)
        self._on_placed()

    def adopt_single_stage(self) -> None:
        """Places all parameters here; used at construction when there is only one stage."""
        names = [*self._state.parameters, *self._state.buffers]
        world = self._session.topology.world_group()
        model = self._state.description()
        check_agreement(self._session.objects, world, model, "have another model")
        self._settle({name: (0,) for name in names})

    def partition_decision(self) -> dict[str, Any]:
        """Where parameters and buffers live, as plain data, and the settings that led there."""
        return {
            "parameter_ranks": {n: list(r) for n, r in self._parameter_ranks.items()},
            "settings": cut_settings(self._session.config),
        }

    def follow_decision(self, decision: Mapping[str, Any]) -> None:
        """Makes the first cut put parameters where they were; on all ranks, before the first step.

        Without effect under other settings. Names of another model are passed over.
        """
        if decision["settings"] != cut_settings(self._session.config):
            return
        known = {*self._state.parameters, *self._state.buffers}
        ranks = decision["parameter_ranks"].items()
        self._parameter_ranks = {name: tuple(held) for name, held in ranks if name in known}

    def _provide_missing(self, cut: CutStep) -> None:
        """Copies buffers to ranks that read them in this step and did not in earlier ones."""
        for name, ranks in sorted(cut.parameter_ranks().items()):
            holders = self._parameter_ranks[name]
            new = [rank for rank in ranks if rank not in holders]
            if not new:
                continue
            assert name not in self._state.parameters, "the partitioner keeps parameters in place"
            value = self._state.buffers[name]
            if self._pp_rank == holders[0]:
                self._link.send_values(new, [value], "tied")
            elif self._pp_rank in new:
                (copy,) = self._link.receive_from(holders[0], [TensorSpec.of(value)], "tied")()
                self._state.adopt_buffer(name, copy)
            self._parameter_ranks[name] = tuple(sorted((*holders, *new)))

    def _note_changes(self, cut: CutStep) -> None:
        """Remembers which buffers steps change: later partitions keep those where they are."""
        changed = {name for stage in cut.stages for name in stage.new_buffers}
        for name in sorted(changed):
            if len(self._parameter_ranks[name]) > 1:
                raise StepError(
                    f"this step function changes the buffer {name}, which several pipeline ranks "
                    f"{list(self._parameter_ranks[name])} hold since an earlier step function. "
                    f"Call the function that changes it (the training step) first."
                )
        self._stateful |= changed


_MEETING = "meeting"
"""Kind of an announcement of what is no step."""


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


def _with_unused(
    cut: CutStep, state: ModelState, restored: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Ranks of all parameters and buffers.

    What this step does not read lives where a checkpoint says it did, or with the rest of its
    module (an evaluation step reads batch norm's statistics and not its counter), or on rank 0.
    """
    ranks = cut.parameter_ranks()
    of_module = {name.rpartition(".")[0]: held for name, held in reversed(ranks.items())}
    return {
        name: ranks.get(name) or restored.get(name) or of_module.get(name.rpartition(".")[0], (0,))
        for name in (*state.parameters, *state.buffers)
    }
