"""The model that a command looks at, from a factory that the user names as `module:function`.

    def tiny():
        model = nn.Linear(8, 1)
        return model, (torch.zeros(4, 8), torch.zeros(4, 1)), train_step

A factory returns the model, example inputs of one microbatch, and what to do with them:

    a step function   `step(model, *inputs)`, with or without `@smp.step`, which calls
                      `model.backward(loss)`; told by its first parameter, `model`
    a loss            `loss(model(*inputs))` gives the scalar to differentiate

Inputs that are no tuple are one argument. Parameters may be on the meta device: nothing is run.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mpxla.errors import MpxlaError
from mpxla.graph.capture.known import Known, with_values_if_needed
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import ToCapture, capture_step
from mpxla.graph.python.floats import Floats
from mpxla.graph.stepgraph import StepGraph
from mpxla.graph.tensor.sequence import divide_sequences
from mpxla.graph.tensor.split_dims import check_split_dims
from mpxla.graph.tensor.varying import mark_varying
from mpxla.graph.tensor.vocabulary import divide_losses
from mpxla.graph.user_code import until_captured
from mpxla.nn.distribute import first_part
from mpxla.runtime.identity import Identities
from mpxla.runtime.model_watch import model_flags
from mpxla.runtime.signature import fill, sign
from mpxla.runtime.state import ModelState

__all__ = ["capture_factory", "capture_part", "load_factory"]


def load_factory(name: str) -> tuple[nn.Module, tuple[Any, ...], Callable[..., Any]]:
    """Imports and calls a factory.

    Args:
        name: `module:function`; the module is looked for in the current folder too.

    Returns:
        The model, example inputs, and the step function or loss.

    Raises:
        MpxlaError: there is no such function, or it returns something else.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise MpxlaError(f"{name!r} names no factory. Write module:function, such as models:gpt.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise MpxlaError(
            f"the module {module_name} of {name!r} cannot be imported: {error}."
        ) from (error)
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise MpxlaError(f"the module {module_name} has no function {function_name!r}.")
    made = factory()
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[0], nn.Module):
        raise MpxlaError(
            f"{name} returned {type(made).__name__}; a factory returns a tuple of model, example "
            "inputs of one microbatch, and a step function or loss."
        )
    model, inputs, function = made
    return model, inputs if isinstance(inputs, tuple) else (inputs,), function


class _Facade:
    """What a step function is given as its model: calls the module, and records backwards."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Records what is differentiated."""
        recorder = current_recorder()
        assert recorder is not None, "step functions of factories run inside captures only"
        recorder.backward(tensors, grad_tensors)


def capture_factory(
    model: nn.Module, inputs: Sequence[Any], function: Callable[..., Any]
) -> StepGraph:
    """Captures one microbatch of what a factory made.

    Raises:
        CaptureError: it cannot be captured.
    """
    plain = inspect.unwrap(function)
    facade = _Facade(model)

    def of_loss(model: Any, *inputs: Any) -> Any:
        loss = plain(model(*inputs))
        model.backward(loss)
        return loss

    step = plain if _is_step(plain) else of_loss
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((facade, *inputs), {})
    signature, tensors, objects = sign(
        "the factory's step", [arguments], model_flags(model), Identities()
    )

    def run(leaves: Sequence[torch.Tensor]) -> Any:
        args, kwargs = fill(signature, leaves, objects)
        return step(*args, **kwargs)

    names, thawed, floats = ModelState(model).canonical_names, set[str](), Floats()

    def attempt(known: Known | None) -> StepGraph:
        leaves = signature.tensor_leaves
        return until_captured(
            lambda: capture_step(
                ToCapture(run, model, leaves, names, known, thawed=thawed, floats=floats)
            )
        )

    return with_values_if_needed(attempt, lambda: tensors[0])


def _is_step(function: Callable[..., Any]) -> bool:
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return False
    return first == "model"


def capture_part(
    model: nn.Module, inputs: Sequence[Any], function: Callable[..., Any], size: int
) -> StepGraph:
    """Captures one microbatch as one rank of a tensor-parallel group has it; changes the model.

    The group has `size` ranks, and `optimize: "memory"`.

    Raises:
        MpxlaError: nothing of the model can be split.
        CaptureError: it cannot be captured.
    """
    shards = first_part(model, size)
    if not shards:
        raise MpxlaError(
            f"--tp {size}: nothing of the model can be split (the lines above say why). Give it a "
            f"_tp_plan, or build it of layers of smp.nn."
        )
    step = capture_factory(model, inputs, function)
    check_split_dims(step, {name: (shard.dim, shard.blocks) for name, shard in shards.items()})
    step = divide_losses(step)
    return divide_sequences(mark_varying(step, set(shards), 0, size), 0, size)
