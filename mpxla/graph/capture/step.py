"""Capture of a step function: user code, model and loss become one functional graph.

The user's function runs once under `torch.export` (non-strict) with fake tensors in place of all
parameters, buffers and inputs, so capture needs no memory and no device, and works the same before
and after partitioning, when a rank no longer holds most parameters. `model.backward(loss)` records
what is differentiated and does nothing else.

This module must not know about stages, ranks or devices other than the host.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpxla.errors import CaptureError, MpxlaError
from mpxla.graph.capture.aliases import Aliases, SecondNames
from mpxla.graph.capture.attached import Attached
from mpxla.graph.capture.carried import carry_written
from mpxla.graph.capture.checkpoints import checkpoints_noted
from mpxla.graph.capture.constants import masks_decided
from mpxla.graph.capture.flags import Flags
from mpxla.graph.capture.functional import functionalize
from mpxla.graph.capture.functional_step import (
    Constants,
    FunctionalStep,
    constants_of,
    functional_step,
)
from mpxla.graph.capture.gradient_hooks import Hook, hook_parameter, hooks_of, module_hooks_captured
from mpxla.graph.capture.hooks import (
    optimizers_refused,
    own_backwards_captured,
    refuse_gradient_hooks,
)
from mpxla.graph.capture.kept_program import recall_step
from mpxla.graph.capture.known import Known
from mpxla.graph.capture.left_state import (
    all_written,
    assigned_buffers_written,
    carried_attributes_written,
    parameter_attributes_written,
)
from mpxla.graph.capture.modes import StepSemantics
from mpxla.graph.capture.modules import modules_noted
from mpxla.graph.capture.own_parameters import Former, OwnParameters
from mpxla.graph.capture.pieces import Joins
from mpxla.graph.capture.recorder import BackwardRecorder, recording_to
from mpxla.graph.capture.retained import backward_told
from mpxla.graph.capture.sparse import refuse_sparse
from mpxla.graph.capture.supposed import tell_of_checks, tell_of_zeros
from mpxla.graph.capture.surroundings import traceable
from mpxla.graph.capture.tensor_places import Attribute
from mpxla.graph.capture.transforms import transforms_captured
from mpxla.graph.capture.whole_parameters import WholeParameters
from mpxla.graph.casts import without_autocast
from mpxla.graph.chosen.none import needs_no_rows, without_checks
from mpxla.graph.containers import open_results, refuse_hidden_tensors
from mpxla.graph.normalize import drop_replayed_views, keep_gradient_barriers
from mpxla.graph.python.answers import Answers, Guess, Undecided
from mpxla.graph.python.arrays import arrays_in_numpy
from mpxla.graph.python.counts import Counts, RaisesError, without_exception
from mpxla.graph.python.decisions import Decisions, Tape
from mpxla.graph.python.floats import Floats
from mpxla.graph.python.number import is_number, numbers_in_math
from mpxla.graph.python.questions import as_question
from mpxla.graph.python.recorded import Recorded
from mpxla.graph.stepgraph import Check, LeftFlag, Print, ResultLeaf, StepGraph
from mpxla.graph.user_code import (
    AgainError,
    OutsideWriteError,
    UndecidedError,
    ValueNeededError,
    explain,
)
from mpxla.kept import Kept

__all__ = [
    "NumberLeaf",
    "TensorLeaf",
    "ToCapture",
    "capture_step",
]


@dataclass(frozen=True)
class TensorLeaf:
    """Shape and dtype of one tensor among the inputs of a step, for one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class NumberLeaf(TensorLeaf):
    """A Python float of the call that is an input of the program, float64 of shape [].

    `value` is the one of the call that is captured; others are served as well.
    """

    value: float = field(default=0.0, compare=False)


@dataclass
class _Returned:
    """What one run of the step function returned, apart from the tensors themselves."""

    leaves: list[ResultLeaf] = field(default_factory=list)
    spec: Any = None
    num_objectives: int = 0
    decisions: Decisions | None = None
    recorded: tuple[Recorded, ...] = ()
    numbers: tuple[int, ...] = ()
    prints: tuple[Print, ...] = ()
    begun: StepSemantics | None = None
    semantics: StepSemantics | None = None
    modules: list[nn.Module] = field(default_factory=list)
    written: frozenset[str] = frozenset()
    flags: dict[str, LeftFlag] = field(default_factory=dict)
    untrained: set[str] = field(default_factory=set)
    attached: Attached = field(default_factory=Attached)
    thawed: set[str] = field(default_factory=set)
    new: list[Attribute] = field(default_factory=list)
    looking: list[tuple[str, Hook]] = field(default_factory=list)
    asked: tuple[str, ...] = ()
    is_question: bool = False


@dataclass(frozen=True, eq=False)
class ToCapture:
    """One microbatch of a step function, and what is known of it.

    Attributes:
        function: takes the tensor leaves of the step's inputs and returns what the user's
            function returns. Calls `model` and `current_recorder().backward`.
        model: the user's model, which holds every trainable parameter.
        leaves: shape and dtype of each tensor input, for one microbatch.
        canonical_names: any name of a parameter or buffer -> the one name used for it (tied
            parameters have several).
        known: values of inputs, for a function whose Python needs them. The graph then is the one
            for all inputs of which Python reads the same.
        kept: holds the graphs of earlier starts, by what was traced.
        answers: to what Python asks of values that depend on the model, in order; it may ask more,
            and the graph then is a question. None if it may not ask.
        left: has what the function leaves in numbers that it changes, when it has run; for a
            capture with `known` values.
        thawed: parameters that are frozen, and that it trains after it has unfrozen them; gets
            others.
        decided: the user's lines that ask whether a mask is true anywhere, where the answer is
            asked for; gets others, if masks choose no rows. None if it may not ask.
        replicas: ranks that hold the same tensors, this one among them, for collectives.
        floats: which modules call `float` of what has no value; gets others.
        former: where parameters and buffers of the model were before they moved.
        aliases: tensors of the script that are buffers of the model; gets others.
        joins: of pieces, which every capture of it tries alike.
    """

    function: Callable[[Sequence[torch.Tensor]], Any]
    model: nn.Module
    leaves: Sequence[TensorLeaf]
    canonical_names: dict[str, str]
    known: Known | None = None
    kept: Kept = field(default_factory=Kept)
    answers: tuple[int, ...] | None = None
    left: Mapping[str, Any] = field(default_factory=dict)
    thawed: set[str] = field(default_factory=set)
    decided: set[str] | None = None
    replicas: Sequence[int] = ()
    floats: Floats = field(default_factory=Floats)
    former: Former = field(default_factory=dict)
    aliases: Aliases = field(default_factory=Aliases)
    joins: Joins = field(init=False, default_factory=Joins)


class _StepModule(nn.Module):
    """Model and step function as one module, as `torch.export` wants it.

    Calls the function, flattens what it returns, and adds the differentiated scalars. What is not
    a tensor goes to `returned`, one object for the module's lifetime: export refuses modules whose
    own attributes change in `forward`.
    """

    def __init__(self, asked: ToCapture, counts: Counts, lines: tuple[str, ...] | None):
        super().__init__()
        real = dict(asked.model.named_parameters())
        buffers = dict(asked.model.named_buffers(remove_duplicate=False))
        # No dictionaries: export compares what modules hold.
        self._real = lambda: (real, buffers)
        self.model = asked.model
        self._asked, self._counts, self._lines = asked, counts, lines
        self.returned = _Returned()
        self.attributes: list[Attribute] = []
        self.hooks: dict[str, list[Hook]] = {}

    def _hook_parameters(self) -> None:
        for name, hooks in self.hooks.items():
            parameter = self._asked.model.get_parameter(name)
            if parameter.requires_grad and torch.is_grad_enabled():
                looking = hook_parameter(parameter, hooks)
                self.returned.looking += [(name, hook) for hook in looking]

    def forward(self, *leaves: torch.Tensor) -> tuple[Any, ...]:
        # Export gives `self.model` by a proxy, where the model has a module in two places.
        known, model = self._asked.known, self._asked.model
        tape = None if known is None else Tape()
        answers = Answers(self._asked.answers, self._lines)
        asked, (parameters, buffers) = self._asked, self._real()
        seconds = SecondNames(model, buffers, asked.canonical_names, asked.former, asked.aliases)
        own = OwnParameters(model, parameters, buffers, asked.former, seconds)
        wholes = WholeParameters(model)
        flags = Flags(model, self._asked.thawed, own)
        self.returned.thawed = flags.thawed
        semantics = StepSemantics(
            *(self._counts, own, wholes, flags, tape, answers),
            *(asked.replicas, asked.floats, asked.joins),
        )
        contents = semantics.writes.contents
        constants, is_trial = semantics.constants, self._counts.none_at is not None
        self.returned.begun = semantics
        trained = [p for p in model.parameters() if p.requires_grad]
        recorder = BackwardRecorder(
            own.given(constants.is_known),
            own.given(constants.is_constant),
            *(contents.note_backward, is_trial),
            *(own.stand_in, trained),
        )
        if known is not None:
            semantics.constants.give_inputs(leaves, known.values, known.decide_sizes)
        flat = list[Any]()
        with recording_to(recorder), contextlib.ExitStack() as stack:
            stack.callback(flags.release)
            stack.callback(own.release)
            stack.callback(wholes.release)
            with (
                semantics,
                self._counts.answering(semantics.constants.truth_of),
                masks_decided(semantics.constants),
                own_backwards_captured(
                    own.given(contents.read),
                    flags.reentrant,
                    semantics.replicas,
                    constants.know_as,
                ),
                checkpoints_noted(),
                modules_noted(self, self.returned.modules, wholes.running),
                module_hooks_captured(),
                optimizers_refused(),
                backward_told(),
                transforms_captured(),
                numbers_in_math(self._counts.number_of),
                arrays_in_numpy(),
                all_written(flat, seconds.note_assigned) as written,
                assigned_buffers_written(model, written, self.returned.attached),
                carried_attributes_written(model, written, self.returned.attached),
            ):
                self._hook_parameters()
                returned = None
                with (
                    contextlib.suppress(Undecided),
                    own.shown(),
                    parameter_attributes_written(
                        model,
                        self.attributes,
                        written,
                        self.returned.attached,
                        semantics.writes.is_copy,
                    ) as self.returned.new,
                ):
                    returned = open_results(self._asked.function(leaves))
                    leaves_out, self.returned.spec = pytree.tree_flatten(returned)
                    flat += map(recorder.recording.returned, own.stand_ins(leaves_out))
                numbers = recorder.recording.results
                for leaf, known_leaf in zip(leaves, asked.leaves, strict=True):
                    if leaf.shape != known_leaf.shape:
                        raise CaptureError(
                            f"The step function changes the shape of an argument in place, from "
                            f"{list(known_leaf.shape)} to {list(leaf.shape)}. Use x.unsqueeze(0) "
                            f"in place of x.unsqueeze_(0), and so on."
                        )
                answers.check()
                semantics.selected.check()
                self.returned.untrained = flags.untrained()
                if tape is not None:
                    semantics.constants.leave(self._asked.left, tape)
                checks = {
                    Check.FINITE: semantics.constants.finite().items(),
                    Check.COUNTED: semantics.constants.shapes.counted,
                    Check.JOINED: semantics.pieces.joined,
                    Check.NO_ROWS: self._counts.denied,
                    Check.ROWS: self._counts.asked,
                }
                for check, found in checks.items():
                    recorder.prints += [(line, passed, check) for line, passed in found]
            state = {id(t): t for t in (*model.parameters(), *model.buffers())}
            self.returned.written = _names_of(contents.finish(state.values()), model)
            self.returned.flags = flags.left()
        self.returned.asked = tuple(answers.lines)
        self.returned.decisions = None if tape is None else tape.decisions()
        self.returned.semantics = semantics
        if answers.is_open:
            return self._ask(answers)
        refuse_sparse(returned)
        flat = pytree.tree_map_only(torch.Tensor, contents.data, flat)
        return self._results(flat, numbers, recorder)

    def _results(
        self, flat: Sequence[Any], numbers: Sequence[torch.Tensor], recorder: BackwardRecorder
    ) -> tuple[torch.Tensor, ...]:
        """What is differentiated, and all that a call of the step has to give."""
        self.returned.leaves = leaves_out = []
        results: list[Any] = []
        for leaf in flat:
            if is_number(leaf):
                leaves_out.append(ResultLeaf(len(results), is_number=True))
                results.append(leaf.tensor.clone())
            elif isinstance(leaf, torch.Tensor):
                leaves_out.append(ResultLeaf(len(results)))
                results.append(leaf.detach())
            elif isinstance(leaf, (torch.SymFloat, torch.SymInt, torch.SymBool)):
                leaves_out.append(ResultLeaf(len(results), is_number=True))
                results.append(leaf)
            elif isinstance(leaf, Recorded):
                leaves_out.append(ResultLeaf(None, is_number=True, value=leaf))
            else:
                refuse_hidden_tensors(leaf)
                is_plain = isinstance(leaf, (bool, int, float))
                leaves_out.append(ResultLeaf(None, is_number=is_plain, value=leaf))
        self.returned.recorded = recorder.recording.recorded
        self.returned.numbers = tuple(range(len(results), len(results) + len(numbers)))
        results += numbers
        self.returned.prints = tuple(
            Print(label, len(results) + place, check)
            for place, (label, _, check) in enumerate(recorder.prints)
        )
        results += [value for _, value, _ in recorder.prints]
        self.returned.num_objectives = len(recorder.objectives)
        return (*recorder.objectives, *results)

    def _ask(self, answers: Answers) -> tuple[torch.Tensor, ...]:
        """The results of a question; nothing is shown, differentiated or returned to the user."""
        returned = self.returned
        returned.leaves = [ResultLeaf(i, is_number=True) for i, _ in enumerate(answers.asked)]
        returned.spec = pytree.tree_structure(answers.asked)
        returned.looking, returned.is_question = [], True
        return tuple(answers.asked)


def capture_step(asked: ToCapture) -> StepGraph:
    """Captures one microbatch of a step function as a functional graph.

    Runs on the host with fake tensors; parameters of the model may be on any device, `meta`
    included. The train/eval mode of the modules and the grad mode are those of the caller.

    Raises:
        AgainError: it trains more frozen parameters, gives parameters attributes that they are to
            have, or calls `float` in other modules.
        ValueNeededError: Python needs the value of a tensor, and more of `known` may help.
        CaptureError: Python needs a value that does not follow from inputs; the function uses
            parameters that do not belong to `model`, relies on hooks or backwards of its own, or
            returns something that cannot be returned.
    """
    decided, answers = asked.decided, asked.answers
    while True:
        try:
            step, raises_at, decided_at = without_exception(
                partial(_captured, asked), decided or ()
            )
            break
        except Exception:
            if asked.joins.are_whole or not asked.joins.are_open:
                raise
            asked.joins.are_whole = True
    if step.is_question:
        return as_question(step)
    told = [check.label for check in step.prints if check.check is Check.ROWS]

    def is_harmless(line: str) -> bool:
        try:
            other = _captured(asked, Counts(line, raises_at, decided_at), step.asked)
        except (CaptureError, RaisesError):
            return False  # it may not go that way
        is_same = not other.is_question and needs_no_rows(step, line, other)
        if is_same and step.is_training:
            tell_of_zeros(line, step.names_in_use() - other.names_in_use())
        return is_same

    lines = set(told)
    harmless = set(filter(is_harmless, lines))
    if asked.known is None and lines - harmless:
        raise ValueNeededError(
            f"The step function asks{min(lines - harmless)} whether a mask is true anywhere, and "
            f"goes on in another way if not."
        )
    # Not where each of many experts is counted, say: there would be too many ways.
    are_few = sum(line not in harmless for line in told) <= MOST_MASKS
    # All answers are for the same questions, so that later ones would come too late.
    is_first = answers is None or any(isinstance(answer, Guess) for answer in answers)
    if lines - harmless and are_few and decided is not None and is_first:
        decided |= lines - harmless
        raise UndecidedError(f"The step function branches{min(decided)} on a mask.")
    tell_of_checks(step, harmless)
    return without_checks(step, harmless)


MOST_MASKS = 8
"""So often a way through a step function may ask for masks that decide."""


def _captured(
    asked: ToCapture, counts: Counts, asked_at: tuple[str, ...] | None = None
) -> StepGraph:
    """See `capture_step`, and `Answers` for lines that asked."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    model, known, canonical_names = asked.model, asked.known, asked.canonical_names
    wrapper = _StepModule(asked, counts, asked_at)
    returned = wrapper.returned
    named = [*model.named_parameters()]
    trained = _names_of([p for n, p in named if p.requires_grad or n in asked.thawed], model)
    wrapper.hooks = {name: found for name, p in named if (found := hooks_of(p))}
    gone: list[tuple[nn.Module, str]] = []

    def thaw() -> None:
        asked.thawed.update(returned.thawed)

    with (
        traceable(
            *(model, fake_mode, trained, gone, counts.number_of, asked.floats)
        ) as wrapper.attributes,
        counts.supposed(),
    ):
        with fake_mode:
            inputs = tuple(torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in asked.leaves)
        try:
            traced = torch.export.export(wrapper, inputs, strict=False)
            if returned.thawed:
                raise AgainError(returned.thawed, thaw)
            if returned.new:
                raise AgainError(returned.new, lambda: [one.start() for one in returned.new])
            drop_replayed_views(traced)
            keep_gradient_barriers(traced.graph_module)
            checks = tuple(p.result for p in returned.prints if p.check is Check.ROWS)
            written = frozenset(canonical_names[name] for name in returned.written)
            untrained = {canonical_names[name] for name in returned.untrained}
            trainable = frozenset(canonical_names[name] for name in trained) - untrained
            is_trial, num_objectives = counts.none_at is not None, returned.num_objectives
            facts = canonical_names, trainable, written, num_objectives, checks, is_trial

            def make() -> tuple[FunctionalStep, Constants]:
                program = functionalize(traced)
                with without_autocast():
                    return functional_step(program, *facts, fake_mode), constants_of(program)

            functional, constants = recall_step(asked.kept, traced, facts, fake_mode, make)
        except Exception as error:
            outside = []
            if returned.semantics is not None:
                returned.semantics.writes.restore()
                outside = returned.semantics.writes.outside
                returned.semantics.own.note_written(tensor for tensor, *_ in outside)
            if returned.thawed:
                raise AgainError(returned.thawed, thaw) from error
            is_final = known is not None and known.decide_sizes
            carry_written(model, [tensor for tensor, *_ in outside])
            explained = explain(error, is_final, [line for _, line, _ in outside])
            if isinstance(explained, OutsideWriteError) and returned.semantics is not None:
                written = [tensor for tensor, *_ in outside]
                explained.written = returned.semantics.own_tensors(written)
            # There are sizes, numbers and arrays without values here, which not all code of torch
            # and of libraries expects, and the user's code may go another way.
            has_reads = returned.begun is not None and returned.begun.constants.has_reads
            is_supposed = counts.has_unknown or counts.asked or has_reads
            is_known = isinstance(error, MpxlaError) or isinstance(explained, ValueNeededError)
            if is_supposed and not is_final and not is_known:
                raised, explained = explained, ValueNeededError(str(explained))
                explained.raised = raised
            elif is_supposed and type(explained) is CaptureError:
                explained = UndecidedError(str(explained))  # perhaps for want of a value
            if counts.last is not None and not isinstance(explained, MpxlaError):
                raise RaisesError(counts.last, explained) from error
            raise explained from error
    if returned.num_objectives:
        refuse_gradient_hooks(model)
    assert returned.semantics is not None, "the function has run"
    own_tensors, reads = returned.semantics.own_tensors, returned.semantics.constants.reads
    tensors_read, lines = [value for value, _ in reads.values()], [s for _, s in reads.values()]
    step = StepGraph(
        graph=functional.graph,
        inputs=functional.inputs,
        outputs=functional.outputs,
        result_leaves=tuple(returned.leaves),
        result_spec=returned.spec,
        constants=dict(zip(constants, own_tensors(constants.values()), strict=True)),
        is_training=returned.num_objectives > 0,
        decisions=returned.decisions,
        recorded=returned.recorded,
        numbers=returned.numbers,
        prints=returned.prints,
        reads=tuple(zip(own_tensors(tensors_read), lines, strict=True)),
        modules=tuple(returned.modules),
        looking=tuple((canonical_names[name], hook) for name, hook in returned.looking),
        accumulated=tuple(
            (canonical_names[name], hook)
            for name, parameter in named
            for hook in hooks_of(parameter, "_post_accumulate_grad_hooks")
            if returned.num_objectives and not returned.is_question
        ),
        asked=returned.asked,
        gone=tuple(gone),
        is_question=returned.is_question,
        flags={canonical_names[name]: flag for name, flag in returned.flags.items()},
    )
    returned.semantics.own.check(step)
    returned.attached.check(step, canonical_names)
    return step


def _names_of(parameters: Sequence[torch.Tensor], model: nn.Module) -> frozenset[str]:
    """All names that a model has for some of its parameters; tied ones have several."""
    held, named = set(map(id, parameters)), model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if id(parameter) in held)
