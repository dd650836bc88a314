"""How the ranks of a pipeline agree on one call of a step function.

The first rank owns the inputs: it describes the call, finds the plan for it and announces both. The
others follow, and check that they do the same. Floats that change become inputs of the program,
changes of the model and wrong indices are noticed here. This module must not know how a plan is
made or run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from mpxla.errors import MpxlaError, RankMismatch, StepError
from mpxla.graph.python.draws import Draw, Drawer, Sources, are_there
from mpxla.graph.python.plain import Read
from mpxla.graph.python.state import OnceRead
from mpxla.graph.user_code import at_user_line
from mpxla.log import warn_once
from mpxla.runtime.asking import Asking
from mpxla.runtime.call import (
    Call,
    as_inputs,
    as_numbers,
    draw_all,
    problem_of_inputs,
    what_differs,
    with_draws,
)
from mpxla.runtime.control import (
    AnnouncedError,
    ControlChannel,
    Meetings,
    as_announced,
    raise_announced,
)
from mpxla.runtime.counting import Counters, leave
from mpxla.runtime.identity import Identities
from mpxla.runtime.microbatch import SplitRule, split_arguments
from mpxla.runtime.model_watch import ModelView, ModelWatch
from mpxla.runtime.number_policy import NumberPolicy
from mpxla.runtime.plans.cache import Plan, Plans
from mpxla.runtime.runner import PlanRunner
from mpxla.runtime.seeds import draw_seed, generator_state, set_generator_state
from mpxla.runtime.sharing import ShardedCalls, Sharing
from mpxla.runtime.signature import (
    Signature,
    describe_change,
    local_objects,
    portable,
    received,
    sign,
)
from mpxla.runtime.ways import (
    Pass,
    problem_of_flags,
    problem_of_ways,
    split_into_passes,
    warn_of_passes,
    why_one_way,
)
from mpxla.session import Session

__all__ = ["Calls"]


class Calls:
    """Calls of step functions on one rank, and the plans that they have led to.

    Args:
        session: configuration, topology and transport.
        model: gives the user's model, or a container of several.

    Attributes:
        control: announcements inside the pipeline.
        meetings: where ranks come together outside of steps.
        sharded: where the first ranks of pipelines that hold parameters together compare calls.
        plans: what runs each kind of call.
    """

    def __init__(self, session: Session, model: Callable[[], nn.Module]):
        group = session.topology.pp_group(session.rank)
        self._session = session
        self._model = model
        self._pp_rank = session.topology.pp_rank(session.rank)
        self.control = ControlChannel(session.transport, group)
        sharing = session.topology.tp_group(session.rank)
        is_prescaled = session.config.prescaled_batch or len(sharing) == 1
        self._sharing = Sharing(session.objects, sharing, session.backend, is_prescaled)
        sharded = session.topology.sdp_group(session.rank)
        self.sharded = ShardedCalls(session.objects, sharded)
        self.meetings = Meetings(session, self.control)
        self.plans = Plans(session.backend.get)
        self._watch = ModelWatch(model)
        self._numbers = NumberPolicy()
        self._functions: dict[str, Identities] = {}
        self._model_counts: dict[str, int] = {}
        self._objects = Identities()
        # What a function may draw, by its title; the last that was drawn comes first.
        self._draws: dict[str, list[tuple[Draw, ...]]] = {}
        # By which generators of the user's, likewise.
        self._generators: dict[str, Sources] = {}
        self._shares = len(sharing) > 1
        self._num_replicas = len(session.topology.rdp_group(session.rank))
        self._asking = Asking(self.plans, self._num_replicas)
        self._counters = Counters(self.plans)

    def agree(
        self, name: str, rule: SplitRule, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Call:
        """The call as the first pipeline rank sees it, on all ranks."""
        if self._pp_rank > 0:
            return self._follow(name, args, kwargs)
        view = self._watch.look()
        try:
            count = self._session.config.microbatches
            parts = split_arguments(rule, args, kwargs, count)
            number = self._functions.setdefault(name, Identities()).number(rule.function)
            call = self._sign(_title(name, number), parts, view)
        except AnnouncedError:
            raise
        except MpxlaError as error:
            self._compare(f"{name}, which fails: {error}", (), (), None)
            self._refuse(name, error)
        # Where ranks that share tensors have samples of their own, all of them have those of all.
        shared = call.tensors if self._sharing.is_prescaled else ()
        self._compare(name, call.passes, shared, portable(call.signature))
        self._announce(call)
        return call

    def _refuse(self, name: str, error: MpxlaError) -> NoReturn:
        """Raises an error of a call on all ranks of the pipeline."""
        self.control.announce(("error", name, type(error), str(error)))
        raise as_announced(error) from None

    def _announce(self, call: Call, problem: str | None = None) -> None:
        """Tells the other ranks of the pipeline what comes next of a call: `_take` is told it.

        Args:
            call: the call.
            problem: why nothing can.

        Raises:
            StepError: a problem of the call, or of its inputs; on all of them.
        """
        next_ = call.passes or ([] if call.question is None else [call.question])
        problem = problem or problem_of_inputs(next_)
        if problem is not None:
            self._refuse(call.name, StepError(problem))
        for plan in (*filter(None, call.ways), *(one.plan for one in next_)):
            if plan.number not in call.plans:
                call.plans[plan.number] = self.plans.use(plan.number)
        if not next_:
            self._set_generators(call)
            drawer = call.drawer = Drawer(call.generators, call.sources)
            before = call.states[call.wanted] if call.states and call.wanted is not None else {}
            call.outside = self.plans.changed_outside(call.signature)
            described = portable(call.signature), drawer.began, before, sorted(call.outside)
            self.control.announce(("new", call.name, *described, [*call.plans]))
            leave(call, before)
            return
        if call.passes:
            self._draw(call.passes[0].plan.signature)
        self._draw_seed(call, next_)
        kind = "known" if call.passes else "ask"
        runs = as_numbers(next_), call.seed, call.left
        self.control.announce((kind, call.name, *runs, [*call.plans]))
        leave(call, call.left)

    def _set_generators(self, call: Call) -> None:
        """Random numbers of Python are the first rank's, on all that share tensors."""
        if self._shares and call.generators is None:
            try:
                call.generators = self._sharing.first(call.name, Drawer().began)
            except RankMismatch as error:
                self._refuse(call.name, error)

    def _sources(self, signature: Signature) -> Sources | None:
        """Generators of the user's that a function draws by.

        Ranks that share tensors would have to have them in one state; they are no inputs there.
        """
        return None if self._shares else self._generators.setdefault(signature.function, {})

    def _draw(self, signature: Signature) -> None:
        """Draws what the function does; the next call probably draws the same."""
        draw_all(signature.draws, self._sources(signature))
        if signature.draws:
            known = self._draws[signature.function]
            known.insert(0, known.pop(known.index(signature.draws)))

    def _draw_seed(self, call: Call, next_: Sequence[Pass]) -> None:
        """A seed for the random operators of one call, which its questions have too.

        Until the call runs, generators stay as they are, since the function may draw by them.
        """
        is_random = any(one.plan.runner.plan.is_random for one in next_)
        if not (is_random or (call.passes and call.seed)) or (call.done and call.seed):
            return
        state, own = torch.get_rng_state(), generator_state()
        seed = draw_seed()
        call.seed = call.seed or self._sharing.seed(seed)
        if not call.passes:
            torch.set_rng_state(state)
            set_generator_state(own)

    def _gather(
        self, signature: Signature, tensors: list[list[torch.Tensor]]
    ) -> tuple[Signature, list[list[torch.Tensor]]]:
        """The call with the microbatches of all ranks that share tensors."""
        name = signature.function
        try:
            everyone = self._sharing.gather(name, tensors, portable(signature))
        except RankMismatch as error:
            self._refuse(name, error)
        return replace(signature, num_microbatches=len(everyone)), everyone

    def _compare(
        self,
        text: str,
        passes: Sequence[Pass],
        tensors: Sequence[Sequence[torch.Tensor]],
        signature: Signature | None,
    ) -> None:
        """Raises, on all ranks of this and of the neighbouring pipelines, if calls differ.

        Args:
            text: the call, or the error that it ended in.
            passes: what runs it; none if something has to be captured first.
            tensors: what ranks that share tensors compare.
            signature: likewise.
        """
        try:
            # Several passes are for those that are not divided (`problem_of_ways`).
            self.sharded.compare(text, passes[0].plan if passes else None)
            self._sharing.compare(text, as_numbers(passes), tensors, signature)
        except RankMismatch as error:
            self._refuse(text, error)

    def _sign(self, title: str, parts: Sequence[Any], view: ModelView) -> Call:
        """Describes a call, with floats that have changed before as inputs, and finds its plan."""
        flags = view.modes, view.trainable

        def described() -> Call:
            inputs = self._numbers.inputs(title)
            signature, tensors, objects = sign(title, parts, flags, self._objects, inputs)
            if not self._sharing.is_prescaled:
                signature, tensors = self._gather(signature, tensors)
            sources = self._sources(signature)
            return self._planned(Call(signature, tensors, objects, sources=sources), view)

        call = described()
        if call.wanted is not None and self._numbers.learn(call.signature, self._known()):
            call = described()
        return call

    def _planned(self, call: Call, view: ModelView) -> Call:
        """The call with its plans, if there are all of them.

        It would draw what a plan says if it came to decide as it did in the plan's capture.
        """
        function = call.signature.function
        if function in self._draws:
            self._set_generators(call)
        if call.signature in self._asking:
            self._asking.begin(call)
            problem = self._advance(call, view)
        elif call.signature in self._counters:
            self._counters.find(call, view)
            problem = self._divide(call)
        else:
            self._find(call, view)
            problem = self._divide(call)
        if problem is not None:
            raise StepError(problem)
        return call

    def _find(self, call: Call, view: ModelView) -> None:
        """Finds plans by what the function has drawn before; wanted is the first that lacks one."""
        for draws in [*self._draws.get(call.signature.function, []), ()]:
            if not are_there(draws, call.sources):
                continue
            given = with_draws(call, draws) if draws else call
            ways = self.plans.find(given.signature, view, given.tensors)
            if not call.ways or ways.count(None) < call.ways.count(None):
                call.ways = ways
            if None not in ways:
                return
        call.wanted = call.ways.index(None)

    def _advance(self, call: Call, view: ModelView) -> str | None:
        """What comes next of a call of a function that asks, and passes if nothing does."""
        problem = self._asking.advance(call, view)
        if problem is None and call.question is None and call.wanted is None:
            problem = self._divide(call)
        return problem

    def answer(self, call: Call, values: Sequence[Sequence[int]]) -> None:
        """Goes on with a call when its question has run; all ranks of the pipeline call it.

        Args:
            call: the call.
            values: what Python has asked for, of each microbatch; on the first rank.
        """
        if self._pp_rank > 0:
            self._take(call, self.control.follow())
            return
        # Ranks that share tensors compute alike, but need not round alike.
        self._asking.take(call, self._sharing.first(call.name, values))
        self._announce(call, self._advance(call, self._watch.look()))

    def go_on(self, call: Call) -> None:
        """Goes on with a call of which a part has run; all ranks of the pipeline call it."""
        call.done += sum(len(one.microbatches) for one in call.passes)
        if self._pp_rank > 0:
            self._take(call, self.control.follow())
            return
        call.passes = []
        self._asking.go_on(call)
        self._announce(call, self._advance(call, self._watch.look()))

    def _divide(self, call: Call) -> str | None:
        """Divides a call into passes, once there is a plan for each of its microbatches.

        Returns:
            Why it cannot have its plans, as the text of an error.
        """
        found = [plan for plan in call.ways if plan is not None]
        plans = list(dict.fromkeys(found))
        if plans and (len(plans) > 1 or None in call.ways):
            reason = problem_of_ways(plans, self._num_replicas)
            if reason is not None:
                function = call.signature.function
                return f"{function}: {what_differs(call)}. {why_one_way(reason)}"
        if None not in call.ways:
            problem = problem_of_flags(call.signature.function, found)
            if problem is not None:
                return problem
        next_ = [plan for plan in call.ways[call.done : call.end] if plan is not None]
        if len(next_) == len(call.ways[call.done : call.end]):
            inputs = {plan: as_inputs(call, plan) for plan in next_}
            divided = split_into_passes(next_, call.done)
            call.passes = [Pass(plan, numbers, inputs[plan]) for plan, numbers in divided]
        if len(call.passes) > 1:
            warn_of_passes(call.signature.function, what_differs(call), call.passes)
        return None

    def _known(self) -> list[Signature]:
        """Signatures of all plans."""
        return [plan.signature for plan in self.plans]

    def _follow(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        message = kind, announced, *rest = self.control.follow()
        self.meetings.check(message, f"the step function {name}{at_user_line()}")
        if announced != name:
            raise RankMismatch(
                f"pp_rank 0 calls the step function {announced} while rank {self._session.rank} "
                f"(pp_rank {self._pp_rank}) calls {name}. All ranks of a pipeline have to call the "
                f"same step functions in the same order."
            )
        raise_announced(message)
        if kind == "new":
            signature = received(rest[0], args, kwargs)
        else:
            signature = self.plans.use(rest[0][0][0]).signature
        view = self._watch.look()  # before modes are those that a microbatch has left
        call = Call(signature, [], {}, arguments=(args, kwargs))
        self._take(call, message)
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
        for plan in call.plans.values():
            change = plan.view.difference(view)
            if change is not None:
                raise RankMismatch(
                    f"{name}: on rank {self._session.rank}, {change} since the step was captured, "
                    f"and on pp_rank 0 it did not. Change the model in the same way on all ranks."
                )
        return call

    def _take(self, call: Call, message: Sequence[Any]) -> None:
        """What comes next of a call, as the first rank has announced it.

        Raises:
            MpxlaError: nothing can.
        """
        raise_announced(message)
        kind, _, *rest = message
        for number in rest[-1]:
            if number not in call.plans:
                call.plans[number] = self.plans.use(number)
        call.passes, call.question = [], None
        if kind == "new":
            call.signature = received(rest[0], *call.arguments)
            call.objects = local_objects(*call.arguments)
            call.drawer = Drawer(rest[1], self._sources(call.signature))
            leave(call, rest[2])
            call.outside = frozenset(rest[3])
            return
        next_ = [Pass(call.plans[number], tuple(own)) for number, own in rest[0]]
        call.seed = rest[1]
        leave(call, rest[2])
        if kind == "known":
            call.passes = next_
            self._draw(next_[0].plan.signature)
        else:
            (call.question,) = next_

    def agree_to_start(self, call: Call, plan: Plan) -> None:
        """What "known" tells with an announcement, for a plan that is new: the seed, or an error.

        The call has no passes afterwards if it needs another plan.

        Raises:
            StepError: the inputs cannot be used; on all ranks of the pipeline.
        """
        call.plans[plan.number] = plan
        checks, step_plan = plan.runner.checks, plan.runner.plan
        draws_or_looks = step_plan.is_random or checks.looks_at_inputs
        has_others = len(call.plans) > 1 or plan.signature.answers is not None or plan.is_once
        step = plan.cut.step
        is_open = draws_or_looks or has_others or step.decisions or step.flags or step.rewritten
        if self._pp_rank == 0:
            problem = self._take_way(call, plan)
            if is_open or problem is not None:
                self._announce(call, problem)
            else:
                self._draw(plan.signature)
        elif is_open:
            self._take(call, self.control.follow())
        else:
            call.passes = [Pass(plan, tuple(range(call.signature.num_microbatches)))]
            self._draw(plan.signature)

    def _take_way(self, call: Call, plan: Plan) -> str | None:
        """Gives a new plan the microbatches that it is for, as far as they have none."""
        assert call.wanted is not None, "it was captured for that one"
        constants = set(call.signature.numbers) - set(plan.signature.numbers)
        if constants:
            self._numbers.keep_constant(call.signature.function, constants)
        given = as_inputs(call, plan)
        change = plan.change([given[call.wanted]])
        if change is not None:
            return (
                f"{call.signature.function}: {change[1]}, in the same microbatch. What decides in "
                f"Python must follow from the arguments."
            )
        if plan.is_once and plan.signature.answers is not None:
            return _problem_of_flag(plan)
        problem = self._counters.add(call, plan, call.signature in self._asking)
        if problem is not None:
            return problem
        if call.signature in self._counters:
            self._counters.find(call, self._watch.look())
            return self._divide(call)
        is_for = [not plan.is_once or i == call.wanted for i in range(len(given))]
        if plan.signature.answers is not None:
            problem = self._asking.add(call, plan)
            return problem or self._advance(call, self._watch.look())
        call.ways = [
            plan if way is None and serves and plan.change([leaves]) is None else way
            for way, leaves, serves in zip(call.ways, given, is_for, strict=True)
        ]
        call.wanted = call.ways.index(None) if None in call.ways else None
        return self._divide(call)

    def keep(
        self,
        signature: Signature,
        reads: Sequence[Read],
        runner: PlanRunner,
        exchanges: Sequence[str],
    ) -> Plan:
        """Keeps a plan, as that of such calls with the model as it is now.

        Args:
            signature: of the calls.
            reads: what the step function read of the model.
            runner: runs the plan.
            exchanges: what ranks that hold parameters together have to do alike.
        """
        view = self._watch.look().captured(self._model(), reads)
        plan = self.plans.add(signature, view, runner, exchanges)
        if signature.draws:
            known = self._draws.setdefault(signature.function, [])
            known[:] = [signature.draws, *(d for d in known if d != signature.draws)]
        self._forget_unused()
        return plan

    def _forget_unused(self) -> None:
        """Lets go of objects and functions that no plan is for any more."""
        known = self._known()
        self._objects.keep({number for signature in known for number in signature.objects})
        titles = {signature.function for signature in known}
        for name, functions in self._functions.items():
            functions.keep([n for n in functions.numbers() if _title(name, n) in titles])
        for title in self._generators.keys() - titles:
            del self._generators[title]
        self._watch.keep([plan.view for plan in self.plans])

    def reason(self, call: Call, num_models: int) -> str:
        """Why a call needs a new program.

        Args:
            call: the call.
            num_models: how many models there are.
        """
        signature = call.signature
        before = self._model_counts.get(signature.function, num_models)
        self._model_counts[signature.function] = num_models
        if before != num_models:  # their flags are part of every signature
            return "another model was made since"
        view = self._watch.look()
        change = self.plans.model_change(signature, view)
        change = change or self.plans.inputs_change(signature, view, call.sample)
        if change is not None and self._pp_rank == 0:
            self._numbers.count_outside(signature.function, change)
        if change is not None:
            return change
        if self._pp_rank == 0:
            self._numbers.count(signature, self._known())
        if any(s.draws and replace(s, draws=()).key == signature.key for s in self._known()):
            warn_once(
                f"random decisions {signature.function}",
                f"step function {signature.function.rpartition('.')[2]} draws random numbers in "
                f"Python. It is compiled for every way that they decide, and for every value of an "
                f"integer or array among them. Where these are many, draw with torch (torch.rand, "
                f"dropout, torch.where), or outside of it, and pass a tensor.",
            )
            return "by random numbers, Python decides otherwise"
        counted = self._counters.reason(signature)
        return counted or describe_change(signature, self._known())


def _problem_of_flag(plan: Plan) -> str:
    """Text of the error of a flag in Python beside branches on what the model computes."""
    names = " and ".join(sorted(r.name for r in plan.view.reads if isinstance(r, OnceRead)))
    return (
        f"{plan.signature.function} goes another way when it has changed {names}, and branches on "
        f"values that depend on the model, too. Make a flag a buffer: register_buffer with "
        f"torch.tensor(False), then self.name.fill_(True); give an attribute for tensors its first "
        f"one before the step."
    )


def _title(name: str, number: int) -> str:
    """Tells functions of one name apart."""
    return name if number == 0 else f"{name}#{number + 1}"
