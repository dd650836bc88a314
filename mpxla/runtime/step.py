"""`smp.step`: the decorator of step functions.

The function is captured, not run per microbatch; everything behind the call is `StepEngine`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, overload

import torch

from mpxla.errors import MpxlaError, StepError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.log import warn_once
from mpxla.runtime.microbatch import SplitRule
from mpxla.session import current

__all__ = ["StepFunction", "step"]


class StepFunction:
    """A decorated step function.

    Called through an instance of a class, it passes the instance on only if the function's first
    parameter is named `self`: scripts also decorate plain functions in a class body and call them
    as `self.train_step(model, batch)`.
    """

    def __init__(self, rule: SplitRule):
        self._rule = rule
        functools.update_wrapper(self, rule.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; every rank of the pipeline must call it.

        Raises:
            StepError: called inside a step function, or with arguments that cannot be split.
            MpxlaError: there is no `DistributedModel`.
        """
        if current_recorder() is not None:
            raise StepError(
                f"the step function {self._rule.function.__qualname__} was called inside another "
                f"step function; call the undecorated function there."
            )
        models = current().models
        if models is None:
            raise MpxlaError(
                f"the step function {self._rule.function.__qualname__} was called before "
                f"smp.DistributedModel; wrap the model first."
            )
        with _ordinary_tensors():
            return models.run_step(self._rule, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        parameters = list(inspect.signature(self._rule.function).parameters)
        if instance is None or not parameters or parameters[0] != "self":
            return self
        return functools.partial(self, instance)


@contextlib.contextmanager
def _ordinary_tensors() -> Generator[None]:
    """`torch.inference_mode()` around a step means that there are no gradients, and no more.

    What a step makes may be kept (parameters that the first one places), and tensors made under
    that mode can never be trained.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@overload
def step(function: Callable[..., Any], /) -> StepFunction: ...


@overload
def step(
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[Callable[..., Any]], StepFunction]: ...


def step(
    function: Callable[..., Any] | None = None,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Makes a function run once per microbatch, over all pipeline stages.

    Use it bare (`@smp.step`) or called (`@smp.step(non_split_inputs=["scale"])`). Every rank of a
    pipeline must call the function; the tensors of pipeline rank 0 count, those of the others may
    be dummies. Tensors in the returned value come back as `StepOutput`, Python numbers as a list
    over microbatches, anything else unchanged. (SMP API reference, "smp.step".)

    Args:
        function: the step function: forward, loss, `model.backward(loss)`, without
            `model.backward` for evaluation.
        non_split_inputs: names of parameters that every microbatch gets whole.
        input_split_axes: parameter name -> batch axis; 0 for all others.
        detach_outputs: returned tensors are always detached; False warns.

    Raises:
        StepError: an option names no parameter of the function.
    """
    if not detach_outputs:
        warn_once(
            "detach_outputs",
            "smp.step(detach_outputs=False) has no effect: a step's gradients are complete when it "
            "returns, so returned tensors are always detached.",
        )

    def decorate(wrapped: Callable[..., Any]) -> StepFunction:
        return StepFunction(SplitRule.of(wrapped, non_split_inputs, input_split_axes))

    return decorate if function is None else decorate(function)
