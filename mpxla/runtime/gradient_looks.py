"""Hooks on gradients of parameters that only look: they are called when a step call has run.

PyTorch calls such a hook in every backward. Here it sees `param.grad` once per call, with what the
microbatches, and earlier calls since `zero_grad`, have added up to.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mpxla.errors import MpxlaError
from mpxla.log import warn_once
from mpxla.runtime.states import ModelStates

__all__ = ["show_gradients"]


def show_gradients(
    hooks: Iterable[tuple[str, Callable[[torch.Tensor], Any]]],
    states: ModelStates,
) -> None:
    """Calls hooks, each with the name of its parameter, of parameters on this rank.

    Raises:
        MpxlaError: a hook changes the gradient, or gives another one.
    """
    for name, hook in hooks:
        parameter = states.tensor(name)
        if parameter is None or parameter.is_meta:
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
