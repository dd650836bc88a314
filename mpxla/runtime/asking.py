"""Calls of step functions that branch on values of the model (`graph/python/answers.py`).

What Python asks for is computed before the step runs, by questions: plans of the step up to there,
which tell all answers so far. A question runs for the microbatches that may go its way, and those
that do not are found another one, until the way of each is known; where there is no plan, the next
one is captured with the answers known so far.

Where a microbatch writes to what questions read (`if not self.is_initialized:`), those after it are
asked again when it has run:

    asked    0 1 2 3    1 2 3    2 3    3        with a counter that each of them raises
    run      0          1        2      3

The first rank of a pipeline keeps this. This module must not know how ranks agree on a call.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from mpxla.graph.python.answers import Guess
from mpxla.graph.python.questions import draws_alike
from mpxla.graph.stepgraph import StepGraph
from mpxla.log import warn_once
from mpxla.runtime.call import Call, as_inputs
from mpxla.runtime.model_watch import ModelView
from mpxla.runtime.plans.cache import Plan, Plans
from mpxla.runtime.plans.cut import CutStep
from mpxla.runtime.signature import Signature, with_constants
from mpxla.runtime.ways import Pass

__all__ = ["Asking", "whole_way"]

MOST_WAYS = 32
"""So many ways through a step function may depend on what the model computes."""


class Asking:
    """What is known of functions that ask."""

    def __init__(self, plans: Plans, num_replicas: int):
        self._plans, self._num_replicas = plans, num_replicas
        self._uses: set[Hashable] = set()
        self._num_places: dict[Hashable, int] = {}

    def __contains__(self, signature: Signature) -> bool:
        """Whether a step function has asked before, called with the same models."""
        return bool(self._uses) and signature.use in self._uses

    def begin(self, call: Call) -> None:
        """Before anything is known of a call."""
        count = call.signature.num_microbatches
        call.ways, call.answers = [None] * count, [()] * count

    def go_on(self, call: Call) -> None:
        """When a part of a call has run: what was known of later microbatches need not hold."""
        rest = len(call.ways) - call.done
        call.ways[call.done :], call.answers[call.done :] = [None] * rest, [()] * rest

    def add(self, call: Call, plan: Plan) -> str | None:
        """A plan was captured for a call; an error's text if it is one too many."""
        _warn(plan)
        self._uses.add(call.signature.use)
        constants = set(call.signature.numbers) - set(plan.signature.numbers)
        if constants or not call.answers:
            _, call.tensors = with_constants(call.signature, call.tensors, constants)
            call.signature = replace(plan.signature, draws=())
            self.begin(call)
        use = call.signature.use
        if plan.num_places > self._num_places.setdefault(use, plan.num_places):
            self._num_places[use] = plan.num_places
            self.go_on(call)  # plans that do not know of these places hold no more
        return _problem_of_number(plan, self._plans)

    def advance(self, call: Call, view: ModelView) -> str | None:
        """Finds what comes next of a call: a question, a capture, or no more of them.

        Returns:
            Why nothing can, as the text of an error.
        """
        waiting: dict[Plan, list[int]] = {}
        call.question = call.wanted = call.end = None
        plans = self._plans.like(call.signature, view)
        for number in range(call.done, len(call.ways)):
            plan = call.ways[number] or self._find(call, number, plans)
            if plan is None:
                call.wanted = number if call.wanted is None else call.wanted
            elif plan.is_question:
                waiting.setdefault(plan, []).append(number)
            else:
                call.ways[number] = plan
                asking = next((other for other in plans if other.goes_by(plan)), None)
                is_next = not waiting and call.wanted is None
                if asking is not None and is_next and number + 1 < len(call.ways):
                    call.end = number + 1
                    problem = self._problem_of_turns(asking, plan)
                    if problem is not None:
                        return problem
                    break
        if waiting:
            call.wanted = None
            plan, numbers = next(iter(waiting.items()))
            call.question = Pass(plan, tuple(numbers), as_inputs(call, plan))
            return None
        if call.wanted is not None:
            call.signature = replace(call.signature, answers=call.answers[call.wanted])
            return None
        found = [*call.plans.values(), *filter(None, call.ways)]
        return _problem_of_draws(call.signature.function, found)

    def take(self, call: Call, values: Sequence[Sequence[int]]) -> None:
        """What the question of a call has told, of each of its microbatches."""
        assert call.question is not None, "it has run"
        told = call.question.plan.signature.answers or ()
        for number, found in zip(call.question.microbatches, values, strict=True):
            pairs = enumerate(zip(found, told, strict=False))
            place = next((i for i, (one, other) in pairs if one != other), len(told))
            call.answers[number] = tuple(found[: place + 1])

    def _problem_of_turns(self, question: Plan, plan: Plan) -> str | None:
        """Why microbatches cannot run one after the other where one decides for those after it."""
        names = " and ".join(sorted(question.goes_by(plan)))
        function = plan.signature.function
        line = "".join(question.cut.step.asked[-1:])
        text = f"branches{line} on a value that depends on {names}, which"
        if self._num_replicas > 1 or plan.signature.draws:
            return (
                f"{function} {text} earlier microbatches write to, so that they have to run one "
                f"after the other. That is not possible with several replicas, nor where Python "
                f"draws random numbers. Use microbatches: 1, torch.where or a mask, or decide "
                f"between steps."
            )
        warn_once(
            f"turns of {function}{line}",
            f"step function {function.rpartition('.')[2]} {text} microbatches write to. They run "
            f"one after the other where they do, which is slower. torch.where or a mask in place "
            f"of the branch is faster.",
        )
        return None

    def _find(self, call: Call, number: int, plans: Iterable[Plan]) -> Plan | None:
        """The plan for a microbatch, as far as there are answers for it.

        Of questions that which was used last: microbatches tend to go the same ways.
        """
        answers, question = call.answers[number], None
        for plan in plans:
            told = plan.signature.answers or ()
            if told[: len(answers)] != answers or not (plan.is_question or told == answers):
                continue
            if plan.change([as_inputs(call, plan)[number]]) is None:
                if not plan.is_question:
                    return plan
                question = question or plan
        return question


def whole_way(
    question: CutStep,
    call: Call,
    told: Callable[[StepGraph], int | None],
    cut_again: Callable[[Call], CutStep],
) -> CutStep | None:
    """A way through a step that begins with a question; None if each raises.

    It need not be the way that is taken, but for what buffers decide: what has to be initialized
    first is placed by what does that. `told` gives what a question says before models are placed,
    if it can; `cut_again` captures a call with more answers.
    """
    cut, answers = question, call.signature.answers or ()

    def with_one_more(answer: int) -> CutStep:
        drawer = None if call.drawer is None else call.drawer.again()
        own = replace(call.signature, answers=(*answers, answer))
        return cut_again(replace(call, signature=own, drawer=drawer))

    while cut.step.is_question:
        answer = told(cut.step)
        if answer is None:
            break
        cut, answers = with_one_more(answer), (*answers, answer)
    else:
        return cut
    for guess in (Guess(False), Guess(True)):
        with contextlib.suppress(Exception):  # a way that is not to be taken may raise
            return with_one_more(guess)
    return None


def _problem_of_draws(function: str, plans: Iterable[Plan]) -> str | None:
    """Why answers of a call do not hold: a question draws other random numbers than the step."""
    questions = [plan for plan in plans if plan.is_question]
    for plan in plans:
        for question in questions:
            answers, whole = question.signature.answers or (), plan.signature.answers or ()
            if plan is question or answers != whole[: len(answers)]:
                continue
            graphs = [[s.graph for s in p.cut.stages] for p in (question, plan)]
            if not draws_alike(*graphs):
                line = question.cut.step.asked[-1]
                return (
                    f"{function} branches{line} on a value that depends on the model and on random "
                    f"numbers (dropout), which would be others when the branch is taken: the step "
                    f"up to there is divided into stages in another way than the whole. Use "
                    f"torch.where in place of the branch, or one pipeline stage."
                )
    return None


def _problem_of_number(plan: Plan, known: Iterable[Plan]) -> str | None:
    """Why a new way is one too many among all plans; None if it is not.

    Those for other values in Python are ways of other steps.
    """
    same = [other for other in known if not other.is_question and other.key == plan.key]
    if sum(other.view.difference(plan.view) is None for other in same) <= MOST_WAYS:
        return None
    return (
        f"{plan.signature.function} branches{plan.cut.step.asked[-1]} on values that "
        f"depend on the model, in more than {MOST_WAYS} ways. Each is a program of its own: use "
        f"torch.where or a mask in place of the branch, or loop a fixed number of times."
    )


def _warn(plan: Plan) -> None:
    """Tells the user, once for each line that asks."""
    step, function = plan.cut.step, plan.signature.function
    if plan.is_question:
        line = step.asked[-1]
        warn_once(
            f"question of {function}{line}",
            f"step function {function.rpartition('.')[2]} branches{line} on a value that depends "
            f"on the model. Each call runs the step up to there first, without gradients, to see "
            f"which way its microbatches go; each way is a program of its own. torch.where or a "
            f"mask in place of the branch is faster.",
        )
