"""One call of a step function as a graph, and what the capture depended on besides the arguments.

This module must not know how ranks agree on a call.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from mpxla.errors import CaptureError, MpxlaError
from mpxla.graph.capture.carried import settle
from mpxla.graph.capture.functional_step import StaleTensorError
from mpxla.graph.capture.known import Known, with_values_if_needed
from mpxla.graph.capture.reads import ModuleRead, ValueRead
from mpxla.graph.capture.recorder import BackwardRecorder, current_recorder, recording_to
from mpxla.graph.capture.step import ToCapture, capture_step
from mpxla.graph.capture.tensor_places import fix_mask, is_constant
from mpxla.graph.python.answers import Guess
from mpxla.graph.python.attempt import Attempt, restore
from mpxla.graph.python.container_state import tensor_entries
from mpxla.graph.python.counted import Counting
from mpxla.graph.python.draws import Drawer, Draws
from mpxla.graph.python.floats import Floats
from mpxla.graph.python.held_objects import Held, held_objects
from mpxla.graph.python.left_numbers import RecordRead, StandIns, numbers_left
from mpxla.graph.python.made_objects import Making
from mpxla.graph.python.memos import fill_memos, stale_memos
from mpxla.graph.python.new_names import NewNames
from mpxla.graph.python.noted_attributes import attributes_noted
from mpxla.graph.python.noted_contents import note_content
from mpxla.graph.python.outside_reads import outside_values, without_counted
from mpxla.graph.python.plain import MISSING, Read
from mpxla.graph.python.reach import Place, outside, places_in
from mpxla.graph.python.recorded import Recording
from mpxla.graph.python.rewritten import ChangedArgumentError, with_copies
from mpxla.graph.python.sources import (
    argument_of_capture,
    iterators_refused,
    random_numbers_noted,
)
from mpxla.graph.python.state import PythonState
from mpxla.graph.stepgraph import OutputKind, StepGraph, is_random
from mpxla.graph.user_code import AgainError, OutsideWriteError, UndecidedError, ValueNeededError
from mpxla.kept import Kept
from mpxla.log import get_logger
from mpxla.runtime.signature import Signature, fill, with_constants
from mpxla.runtime.states import ModelStates

__all__ = ["Traced", "Tracing"]

Traced = tuple[Signature, StepGraph, list[Read]]
"""The signature that a graph serves, the graph, and what the function read outside."""
WithAll = Callable[[], tuple[Signature, Sequence[torch.Tensor]]]
"""Gives a call with all numbers in its signature, and the tensor leaves of one microbatch."""


@dataclass(frozen=True)
class Tracing:
    """What a call of a step function gives to its captures.

    `values` gives the tensor leaves of one microbatch, where Python needs them; `state` is what
    captures leave in attributes. `decided` is for `capture_step`, and the function's own from call
    to call: all its ways ask alike. So are `replicas` and `floats`. `rewritten` gets the paths of
    arguments that the function changes; its own, too. `sized` gets the answers after which values
    of inputs have to decide sizes; ways that begin so need not be tried without.
    """

    function: Callable[..., Any]
    objects: Mapping[str, Any]
    states: ModelStates
    values: Callable[[], Sequence[torch.Tensor]]
    graphs: Kept
    state: PythonState = field(default_factory=PythonState)
    decided: set[str] | None = None
    replicas: Sequence[int] = ()
    floats: Floats = field(default_factory=Floats)
    rewritten: set[str] = field(default_factory=set)
    sized: set[tuple[int, ...]] = field(default_factory=set)

    def trace(self, signature: Signature, drawer: Drawer | None, may_ask: bool = True) -> Traced:
        """Captures a step with as many of its floats as inputs as Python lets it.

        Without a drawer, random numbers of Python stay as they are. Python may ask for values that
        depend on the model (`graph/python/answers.py`) if it `may_ask`.

        Returns:
            The signature has constants in the places of floats whose value Python needs, what the
            function draws, and answers if it asks for values.

        Raises:
            CaptureError: the function cannot be captured.
        """
        if signature.answers is not None:
            self.state.stop_counting(asks=True)  # it would be another number on every way
        if signature.answers == () and may_ask:
            self._find_masks_that_decide(signature, drawer and drawer.again())
        try:
            found = self._with_few_draws(signature, drawer)
        except UndecidedError as error:
            masks = self.states.fix_masks()
            while masks:  # but for those that the step writes to
                try:
                    return self.trace(signature, drawer and drawer.again(), may_ask)
                except OutsideWriteError as outside:
                    ids = set(map(id, outside.written))
                    written = [mask for mask in masks if id(mask) in ids] or masks
                except MpxlaError:
                    written = masks
                for mask in written:
                    fix_mask(mask, decides=False)
                masks = [mask for mask in masks if is_constant(mask)]
            if self.state.is_following:  # which may be why
                self.state.stop_counting()
                return self.trace(signature, drawer and drawer.again(), may_ask)
            if signature.answers is not None or not may_ask:
                raise CaptureError(*error.args) from error.__cause__
        else:
            self.state.take()
            return found
        return self.trace(replace(signature, answers=()), drawer and drawer.again())

    def _fill_memos(self, look: bool) -> None:
        """Has the step captured again if functions remember tensors of this capture."""
        if stale := stale_memos(self.state.filled_memos, look):
            raise AgainError([memo.__name__ for memo in stale], partial(fill_memos, stale))

    def _find_masks_that_decide(self, signature: Signature, drawer: Drawer | None) -> None:
        """Goes through the whole function, before the first question, which is only a part."""
        self.state.is_trial = True
        for guess in (Guess(False), Guess(True)):
            with contextlib.suppress(Exception):  # a way that is not to be taken may raise
                self._with_few_draws(replace(signature, answers=(guess,)), drawer)
        self.state.is_trial = False

    def _with_few_draws(self, signature: Signature, drawer: Drawer | None) -> Traced:
        """Scalars that torch draws are inputs only where nothing else will do."""
        if drawer is None:
            return self._with_few_constants(signature, None)
        is_asking = signature.answers is not None
        draws = Draws(drawer, with_scalars=is_asking)
        try:
            return self._with_few_constants(signature, draws)
        except Exception:  # torch says in many ways that it wants a number of Python
            if is_asking or not draws.has_scalars:
                raise
        return self._with_few_constants(signature, Draws(drawer.again(), with_scalars=True))

    def _with_few_constants(self, signature: Signature, draws: Draws | None) -> Traced:
        numbers = signature.numbers
        if not numbers:
            return self._with_few_values(signature, draws, set())
        with contextlib.suppress(Exception):  # where it is another fault, it comes again below
            return self._with_few_values(signature, draws, set())
        constants, found = set(numbers), None
        for path in numbers if len(numbers) > 1 else ():
            with contextlib.suppress(Exception):
                found = self._with_few_values(signature, draws, constants - {path})
                constants.discard(path)
        return found or self._with_few_values(signature, draws, constants)

    def _with_few_values(
        self, signature: Signature, draws: Draws | None, constants: set[str]
    ) -> Traced:
        chosen, _ = with_constants(signature, [], constants)

        def given() -> Sequence[torch.Tensor]:
            _, (found,) = with_constants(signature, [self.values()], constants)
            return found

        answers = signature.answers

        def with_all() -> tuple[Signature, Sequence[torch.Tensor]]:
            found, (leaves,) = with_constants(signature, [self.values()], set(signature.numbers))
            return found, leaves

        def capture(known: Known | None) -> Traced:
            found = self._drawn(chosen, known, draws, with_all)
            is_sized = known is not None and known.decide_sizes
            if is_sized and answers is not None and not any(isinstance(a, Guess) for a in answers):
                self.sized.add(answers)
            return found

        is_sized = answers is not None and any(s == answers[: len(s)] for s in self.sized)
        return with_values_if_needed(capture, given, answers is not None, is_sized)

    def _drawn(
        self, signature: Signature, known: Known | None, draws: Draws | None, with_all: WithAll
    ) -> Traced:
        """Captures once more if it has drawn."""
        if draws is None:
            return self._captured(signature, known, None, with_all)
        while True:
            asked, given = replace(signature, draws=tuple(draw for draw, _ in draws.known)), known
            if given is not None:
                given = replace(given, values=(*given.values, *draws.values()))
            found = self._captured(asked, given, draws, with_all)
            if draws.is_complete:
                return found

    def _captured(
        self, signature: Signature, known: Known | None, draws: Draws | None, with_all: WithAll
    ) -> Traced:
        function, model = self.function, self.states.module
        given = {path: argument_of_capture(v, path, draws) for path, v in self.objects.items()}
        objects = self.objects
        own = [Place(f"argument {p}", v, partial(objects.get, p), None) for p, v in objects.items()]
        thawed: set[str] = set()
        paths = signature.argument_paths

        def run(
            leaves: Sequence[torch.Tensor],
            counting: Counting,
            stand_ins: StandIns,
            notes: Sequence[Callable[[], None]],
        ) -> Any:
            end = len(leaves) - len(counting.counts)
            if draws is not None:
                draws.begin(leaves[end - len(signature.draws) : end])
            counting.begin(leaves[end:])
            stand_ins.begin(model)

            def of_leaves(leaves: Sequence[torch.Tensor]) -> Any:
                args, kwargs = fill(signature, leaves, given)
                return function(*args, **kwargs)

            try:
                return with_copies(of_leaves, leaves, paths, self.rewritten)
            finally:
                stand_ins.end()
                for note in notes:
                    note()
                counting.end()

        def capture(
            counting: Counting, stand_ins: StandIns, notes: Sequence[Callable[[], None]]
        ) -> StepGraph:
            names = self.states.current_names()
            asked, values = replace(signature, counts=counting.counts), known
            if values is not None:
                values = replace(values, values=(*values.values, *counting.values))
            try:
                step = capture_step(
                    ToCapture(
                        partial(run, counting=counting, stand_ins=stand_ins, notes=notes),
                        *(model, asked.tensor_leaves, names, values, self.graphs),
                        *(signature.answers, counting.left, thawed, self.decided),
                        *(self.replicas, self.floats, self.states.former(), self.states.aliases),
                    )
                )
            except ChangedArgumentError as error:
                if error.place >= len(paths):
                    raise
                path = paths[error.place]  # of which the next capture gives it a copy
                raise AgainError(path, partial(self.rewritten.add, path)) from error
            except StaleTensorError:
                self._fill_memos(look=True)
                raise
            if any(map(is_random, step.graph.nodes)):  # which a memo draws once
                self._fill_memos(look=False)
            used = {role.name for node, role in step.roles.items() if node.users}
            is_same = step.follows_from_itself
            settle(model, lambda n: names[n] in used, lambda n: is_same(names[n]))
            return step

        def attempt(counting: Counting, records: Mapping[str, RecordRead] = {}) -> Attempt:
            if counting.names and known is None:
                raise ValueNeededError(f"the step changes {', '.join(counting.names)}")
            found, counted = outside(function, model), counting.names | records.keys()
            found.places += own
            made = NewNames(found, self.state.made)
            values = [read for read in outside_values(found) if read.name not in counted]
            reads = [without_counted(read, counted) for read in values]
            for read in values:
                note_content(read.now(), self.state.contents)
            there = (place for place in found.places if place.value is not MISSING)
            named = ((place.name, place.value, place.get) for place in there)
            roots = [("model", model, lambda: model), *named]
            held, contents = held_objects(roots, self.state.held), self.state.contents
            reached = [*found.places, *places_in(held.values())]
            stand_ins, computed = StandIns(records), dict[str, RecordRead]()
            by_inputs: dict[str, RecordRead] = {}

            def note() -> None:
                made.check()
                for making in self.state.making:
                    making.check(log.written)
                recorder = current_recorder()
                assert recorder is not None, "the function runs in a capture"
                log.note_tables(recorder)
                log.note_contents(recorder.is_constant, [read.now() for read in values])
                is_known, is_constant = recorder.is_known, recorder.is_constant
                others, known_too = numbers_left(
                    log, values, contents, is_known, is_constant, self.state.filled_once
                )
                left = [*stand_ins.left, *others]
                computed.update((read.name, read) for read, _ in left)
                by_inputs.update(known_too)
                recorder.recording = Recording({read.name: value for read, value in left})

            make = partial(self._make, with_all, held, [one for one, _ in contents])
            notes = [note]
            with (
                torch.set_grad_enabled(signature.grad_enabled),
                iterators_refused(reached),
                random_numbers_noted(reached, draws),
                attributes_noted(held, found.names, counted, contents, model, make) as log,
            ):
                try:
                    step = capture(counting, stand_ins, notes)
                    for making in self.state.making:
                        making.check_tensors(self._written(step))
                    log.start_carried(model, step.gone)
                    return Attempt(step, log.reads(), log, reads, computed, by_inputs, found.places)
                except OutsideWriteError as error:
                    restore(log, reads)
                    places = [*reads, *log.places()]
                    entries = [entry for read in places for entry in tensor_entries(read)]
                    if not any(map(is_constant, error.written)):
                        self.state.leave_written(error, [*places, *entries])
                    raise
                except BaseException:
                    restore(log, reads)
                    raise
                finally:  # it holds containers, of weak references to parameters, too
                    notes.clear()

        try:
            step, own_reads = self.state.judged(attempt)
        except (ValueNeededError, UndecidedError):  # which another capture answers
            raise
        except Exception as error:
            if not self.state.unmade:
                raise
            raise CaptureError(self.state.unmade[0]) from error
        signature = replace(signature, counts=self.state.counts)
        reads = [*own_reads, *map(ModuleRead.of, step.modules)]
        constants = (*step.constants.values(), *(tensor for tensor, _ in step.reads))
        reads += self.states.aliases.reads(constants)
        return signature, step, [*reads, *(ValueRead.of(*read) for read in step.reads)]

    def _written(self, step: StepGraph) -> set[int]:
        names = [role.name for role in step.outputs if role.kind is OutputKind.BUFFER]
        return {id(self.states.tensor(name)) for name in names}

    def _make(
        self, with_all: WithAll, held: Mapping[int, Held], others: Sequence[Any], what: str
    ) -> None:
        """Runs the function in plain PyTorch, for what it makes and keeps (`made_objects.py`)."""
        making = Making(held, others)
        devices = {p.device: None for p in self.states.module.parameters() if not p.is_meta}
        device = next(iter(devices), torch.device("cpu"))
        signature, given = with_all()
        leaves = [leaf.detach().clone().to(device) for leaf in given]
        failed = ""
        with making.noted(), recording_to(BackwardRecorder.of_nothing()):
            try:
                args, kwargs = fill(signature, leaves, self.objects)
                with torch.set_grad_enabled(signature.grad_enabled):
                    self.function(*args, **kwargs)
            except Exception as error:  # what it has made before will do
                failed = f" ({type(error).__name__}: {error})"  # whose frames hold autograd's graph
        self.state.making.append(making)
        if making.names:
            made = ", ".join(making.names)
            get_logger().info("the step function ran once in plain PyTorch to make %s", made)
            return
        self.state.unmade.append(
            f"The step function makes {what} that the model keeps. To have it, the function runs "
            f"once in plain PyTorch, where it does not come so far{failed}. Make it in __init__, "
            f"or call the model once before it is given to smp.DistributedModel."
        )
