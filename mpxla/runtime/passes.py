"""Running a call: one pass of its plan, or several where its microbatches go different ways.

run      each pass runs its microbatches; what it writes to buffers is there for the next one, and
         gradients of a plan are added up over its passes
reduce   once per call: a plan's gradients are complete with its last pass, and replicas reduce
         what all plans give as if it came from the stages of one
return   results of all passes, in the order of microbatches

Where a microbatch may decide which way later ones go, a call is run in parts (`asking.py`), and
gradients add up as they do over calls.

This module must not know how ranks agree on a call.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

from mpxla.comm.stall import Progress
from mpxla.device.backend import Backend
from mpxla.errors import MpxlaError
from mpxla.log import warn_once
from mpxla.runtime.call import Call
from mpxla.runtime.outputs import Part, build_outputs, leave_numbers
from mpxla.runtime.plans.cache import MAX_PLANS, Plan
from mpxla.runtime.plans.plan import StepPlan
from mpxla.runtime.reduction import Gradients, Reducers, StepReduction
from mpxla.runtime.runner import Ran
from mpxla.runtime.states import ModelStates
from mpxla.runtime.valueless import AbsentParameter
from mpxla.runtime.watching.recorder import Recorder
from mpxla.runtime.ways import Pass

__all__ = ["CallRunner"]


class CallRunner:
    """Runs calls on one rank."""

    def __init__(
        self,
        states: ModelStates,
        reducers: Reducers,
        backend: Backend,
        describe: Callable[[StepPlan], dict[str, object]],
        progress: Progress,
    ):
        self._states, self._reducers, self._backend = states, reducers, backend
        self._describe, self._progress = describe, progress
        self._reductions: OrderedDict[tuple[int, ...], StepReduction] = OrderedDict()

    def run(self, call: Call, recorder: Recorder | None) -> tuple[list[Part], list[Ran]]:
        """Runs a call, or its next part; every rank of the pipeline must.

        Gives the results of each pass, and what it has left. The recorder is there while a profile
        is taken.
        """
        passes = call.passes
        plans = sorted({one.plan for one in passes}, key=lambda plan: plan.number)
        reduction = self._reduction(plans)
        whole: dict[int, list[torch.Tensor]] = {}
        shares: dict[Plan, Gradients] = {}
        if reduction is not None:
            scale = reduction.objective_scale
            ends = accumulate(len(plan.cut.stages) for plan in plans)
            shares = {
                plan: Gradients(reduction, scale, whole, end - len(plan.cut.stages))
                for plan, end in zip(plans, ends, strict=True)
            }
            reduction.begin()
        found: list[Ran] = []
        for index, one in enumerate(passes):
            if found:
                passes[index - 1].plan.runner.scale_rows(found[-1])
                self._end(recorder)
            gradients = shares.get(one.plan)
            is_last = all(later.plan is not one.plan for later in passes[index + 1 :])
            if gradients is not None:
                gradients.is_last = is_last
            if recorder is not None:
                plan = one.plan.runner.scheduled(one.microbatches, is_last)
                recorder.begin_step(one.plan.signature.function, self._describe(plan))
            arguments = one.tensors, one.microbatches, call.seed, self._progress
            found.append(one.plan.runner.run(*arguments, recorder, gradients))
        if reduction is not None:
            reduction.finish(whole)
        else:
            stages = (stage for plan in plans for stage in plan.cut.stages)
            self._reducers.note_written([name for stage in stages for name in stage.new_buffers])
        steps = [plan.cut.step for plan in plans]
        hooks = {(name, id(hook)): hook for step in steps for name, hook in step.looking}
        if call.is_last:
            _show_gradients([(name, hook) for (name, _), hook in hooks.items()], self._states)
            _tell_of_accumulation(call.plans.values(), self._states)
        passes[-1].plan.runner.scale_rows(found[-1])
        self._end(recorder)
        parts = [
            Part(
                *(step.result_leaves, step.result_spec, ran.microbatches, ran.results),
                *(one.plan.records, step.numbers),
            )
            for one, ran in zip(passes, found, strict=True)
            for step in [one.plan.cut.step]
        ]
        return parts, found

    def leave(self, parts: Sequence[Part]) -> None:
        """Numbers of the model are then where the step function leaves them."""
        leave_numbers(parts, self._backend.publish)

    def outputs(self, parts: Sequence[Part], own: slice) -> Any:
        """What the step function returns, of the microbatches that this rank brought."""
        return build_outputs(parts, own, self._backend.publish, self._backend.adopt)

    def ask(self, question: Pass, seed: int) -> list[list[int]]:
        """What Python asks for, of each microbatch of a question; all ranks of the pipeline."""
        runner = question.plan.runner
        ran = runner.run(question.tensors, question.microbatches, seed, self._progress)
        answers = range(len(question.plan.cut.step.asked))
        found = [[self._backend.view(v).item() for v in ran.fetch(index)] for index in answers]
        return [list(one) for one in zip(*found, strict=True)]

    def _end(self, recorder: Recorder | None) -> None:
        if recorder is not None:
            recorder.end_step()

    def _reduction(self, plans: Sequence[Plan]) -> StepReduction | None:
        """The reduction of a call that these plans run; None if it evaluates."""
        if len(plans) == 1:
            return plans[0].runner.reduction
        cuts = [plan.cut for plan in plans]
        if not any(cut.step.is_training for cut in cuts):
            return None
        key = tuple(plan.number for plan in plans)
        known = self._reductions
        if key not in known:
            count = plans[0].signature.num_microbatches
            known[key] = self._reducers.prepare(cuts, count, [])  # `ways` sees that none exchanges
            if len(known) > MAX_PLANS:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key]


def _show_gradients(
    hooks: Iterable[tuple[str, Callable[[torch.Tensor], Any]]], states: ModelStates
) -> None:
    """Calls hooks on gradients that only look, each with the name of its parameter.

    PyTorch calls such a hook in every backward. Here it sees `param.grad` of parameters on this
    rank once per call, with what the microbatches, and earlier calls since `zero_grad`, have added
    up to.

    Raises:
        MpxlaError: a hook changes the gradient, or gives another one.
    """
    for name, hook in hooks:
        parameter = states.tensor(name)
        if parameter is None or isinstance(parameter, AbsentParameter):
            continue
        gradient = parameter.grad
        if gradient is None:
            warn_once(
                f"hook on {name}",
                f"the hook on the gradient of {name} is not called, since its param.grad is None: "
                f"gradients are on masters, or divided over ranks.",
            )
            continue
        before = gradient._version
        if hook(gradient) is not None or gradient._version != before:
            raise MpxlaError(
                f"The hook on the gradient of {name} changes it, and could not be compiled into "
                f"the step, since it needs values in Python, or what it changes is not the "
                f"gradient that it is given. Write it with operators of torch (torch.where in "
                f"place of `if`) and return the new gradient; or change param.grad between the "
                f"step call and optimizer.step()."
            )


def _tell_of_accumulation(plans: Iterable[Plan], states: ModelStates) -> None:
    """Calls hooks by `register_post_accumulate_grad_hook` for what this rank has trained.

    PyTorch calls such a hook after every backward. Here it gets its parameter once per call, when
    `param.grad` is complete, and may do with both what it wants, such as an update.
    """
    hooks = {(n, id(hook)): hook for plan in plans for n, hook in plan.cut.step.accumulated}
    if not hooks:
        return
    trained = {n for plan in plans for stage in plan.cut.stages for n in stage.trained}
    for (name, _), hook in hooks.items():
        parameter = states.tensor(name) if name in trained else None
        if parameter is not None and not isinstance(parameter, AbsentParameter):
            hook(parameter)
