"""One call of a step function as a graph, and what the capture depended on besides the arguments.

This module must not know how ranks agree on a call.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mpxla.errors import CaptureError
from mpxla.graph.capture import Known, capture_step, with_values_if_needed
from mpxla.graph.capture_attributes import Read, attributes_noted, kept, outside_values
from mpxla.graph.capture_reads import ModuleRead, ValueRead
from mpxla.graph.capture_sources import (
    argument_without_iterator,
    iterators_refused,
    random_numbers_noted,
)
from mpxla.graph.draws import Drawer, Draws
from mpxla.graph.parameter_attributes import NewAttributesError
from mpxla.graph.stepgraph import StepGraph
from mpxla.graph.user_code import UndecidedError
from mpxla.kept import Kept
from mpxla.runtime.signature import Signature, fill, with_constants
from mpxla.runtime.states import ModelStates

__all__ = ["Traced", "trace"]

Traced = tuple[Signature, StepGraph, list[Read]]
"""The signature that a graph serves, the graph, and what the function read outside."""


def trace(
    signature: Signature,
    function: Callable[..., Any],
    objects: Mapping[str, Any],
    states: ModelStates,
    values: Callable[[], Sequence[torch.Tensor]],
    graphs: Kept,
    drawer: Drawer | None,
    may_ask: bool = True,
) -> Traced:
    """Captures a step with as many of its floats as inputs as Python lets it.

    Args:
        signature: of the call, with floats that should be inputs.
        function: the step function.
        objects: this rank's own objects among the arguments, by path.
        states: parameters and buffers of all models.
        values: gives the tensor leaves of one microbatch, where Python needs them.
        graphs: those of earlier starts.
        drawer: draws random numbers of Python; None if they are to stay as they are.
        may_ask: whether Python may ask for values that depend on the model (`graph/answers.py`).

    Returns:
        The signature has constants in the places of floats whose value Python needs, what the
        function draws, and answers if it asks for values.

    Raises:
        CaptureError: the function cannot be captured.
    """

    values = functools.cache(values)
    if signature.answers is None:
        given = function, objects, states, values, graphs, drawer
        try:
            return _attempts(signature, *given)
        except UndecidedError as error:
            if not may_ask:
                raise CaptureError(*error.args) from error.__cause__
        signature = replace(signature, answers=())
        drawer = None if drawer is None else drawer.again()
    try:
        return _attempts(signature, function, objects, states, values, graphs, drawer)
    except UndecidedError as error:
        raise CaptureError(*error.args) from error.__cause__


def _attempts(
    signature: Signature,
    function: Callable[..., Any],
    objects: Mapping[str, Any],
    states: ModelStates,
    values: Callable[[], Sequence[torch.Tensor]],
    graphs: Kept,
    drawer: Drawer | None,
) -> Traced:
    """See `trace`; with as few values of inputs, and as few constants, as will do."""

    def attempt(chosen: Signature, known: Known | None, draws: Draws | None) -> Traced:
        if draws is None:
            return _trace(chosen, function, objects, states, known, graphs, None)
        while True:  # once more if it has drawn
            asked, given = replace(chosen, draws=tuple(draw for draw, _ in draws.known)), known
            if given is not None:
                given = replace(given, values=(*given.values, *draws.values()))
            found = _trace(asked, function, objects, states, given, graphs, draws)
            if draws.is_complete:
                return found

    def run(draws: Draws | None, constants: set[str]) -> Traced:
        chosen, _ = with_constants(signature, [], constants)

        def given() -> Sequence[torch.Tensor]:
            _, (found,) = with_constants(signature, [values()], constants)
            return found

        needs = signature.answers is not None
        return with_values_if_needed(lambda known: attempt(chosen, known, draws), given, needs)

    def traced(draws: Draws | None) -> Traced:
        numbers = signature.numbers
        if not numbers:
            return run(draws, set())
        with contextlib.suppress(Exception):  # where it is another fault, it comes again below
            return run(draws, set())
        constants, found = set(numbers), None
        for path in numbers if len(numbers) > 1 else ():
            with contextlib.suppress(Exception):
                found = run(draws, constants - {path})
                constants.discard(path)
        return found or run(draws, constants)

    if drawer is not None and signature.answers is not None:
        return traced(Draws(drawer, with_scalars=True))
    draws = None if drawer is None else Draws(drawer)
    try:
        return traced(draws)
    except CaptureError:
        if drawer is None or draws is None or not draws.has_scalars:
            raise
    return traced(Draws(drawer.again(), with_scalars=True))


def _trace(
    signature: Signature,
    function: Callable[..., Any],
    objects: Mapping[str, Any],
    states: ModelStates,
    known: Known | None,
    graphs: Kept,
    draws: Draws | None,
) -> Traced:
    given = {path: argument_without_iterator(v, path) for path, v in objects.items()}
    model = states.module
    outer = outside_values(function, model)
    others = [*outer.objects, *((f"argument {path}", value) for path, value in objects.items())]

    def run(leaves: Sequence[torch.Tensor]) -> Any:
        if draws is not None:
            draws.begin(leaves[len(leaves) - len(signature.draws) :])
        args, kwargs = fill(signature, leaves, given)
        return function(*args, **kwargs)

    def capture() -> StepGraph:
        names = states.current_names()
        try:
            leaves, answers = signature.tensor_leaves, signature.answers
            return capture_step(run, model, leaves, names, known, graphs, answers)
        except NewAttributesError as error:
            for found in error.attributes:
                found.start()
        return capture()

    with (
        torch.set_grad_enabled(signature.grad_enabled),
        iterators_refused(function, model),
        random_numbers_noted(function, model, draws),
        attributes_noted(model, others, outer.texts) as log,
    ):
        step = capture()
    reads = [*kept(outer.reads), *log.reads(), *map(ModuleRead.of, step.modules)]
    return signature, step, [*reads, *(ValueRead.of(*read) for read in step.reads)]
