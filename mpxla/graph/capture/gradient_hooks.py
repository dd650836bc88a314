"""Hooks on gradients, which PyTorch calls while it differentiates.

In a captured step an operator stands between a tensor and what reads it, and its backward is the
hook. Here such operators are made, while the step is captured; `hooked.py` puts them in their
places in the functional graph.

A hook of a parameter that changes nothing is called with the gradient when a step call has run. One
of another tensor or of a module is left out then, since such gradients never leave the programs.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd import graph as autograd_graph
from torch.nn.modules import module as torch_modules

from mpxla.errors import CaptureError
from mpxla.graph.capture.autograd import apply_captured
from mpxla.graph.exchanged import exchanged
from mpxla.graph.hooked import HOOKED
from mpxla.graph.typed import Function
from mpxla.graph.user_code import at_user_line
from mpxla.log import warn_once

__all__ = ["Hook", "hook_parameter", "hook_tensor", "hooks_of", "module_hooks_captured"]

Hook = Callable[[torch.Tensor], Any]
_Gradients = Sequence[torch.Tensor]


class _LooksError(Exception):
    """A hook changes nothing."""


def hooks_of(parameter: torch.Tensor, kind: str = "_backward_hooks") -> list[Hook]:
    """Hooks that somebody else than torch has registered for the gradient of a parameter."""
    table: Any = getattr(parameter, kind, None) or {}
    return [hook for hook in table.values() if not getattr(hook, "is_internal", False)]


def hook_tensor(
    tensor: torch.Tensor, hook: Hook, is_late: Callable[[], bool] = lambda: False
) -> "_Handle":
    """`tensor.register_hook(hook)` in a step function.

    Args:
        tensor: which is no parameter.
        hook: takes the gradient.
        is_late: whether the step has called backward.

    Raises:
        CaptureError: the tensor is a parameter or an input, or backward was called before.
    """
    line = at_user_line()
    if is_late():
        raise CaptureError(
            f"register_hook was called in a step function{line} after model.backward. Register it "
            f"before."
        )
    if tensor.is_leaf:
        raise CaptureError(
            f"register_hook was called in a step function{line} on a parameter or an input. "
            f"Register a hook of a parameter once, before the step call."
        )
    try:
        if getattr(getattr(hook, "__code__", None), "co_filename", "") == autograd_graph.__file__:
            raise _LooksError  # of register_multi_grad_hook; it asks the engine of autograd
        _hooked([tensor], (), lambda gradients, _: [_changed(hook, gradients[0])])
    except _LooksError:
        _tell_of_looks(f"a hook that was registered{line}")
    return _Handle(is_late)


def hook_parameter(parameter: torch.Tensor, hooks: Sequence[Hook]) -> list[Hook]:
    """Has the hooks of a parameter change its gradient, in their order.

    Returns:
        Those that only look, or that need values.
    """
    looking: list[Hook] = []
    for hook in hooks:
        try:
            _hooked([parameter], (), lambda gs, _, hook=hook: [_changed(hook, gs[0])])
        except Exception:  # it looks at numbers, say; whether it does no more is seen later
            looking.append(hook)
    return looking


def module_hooks_captured() -> AbstractContextManager[None]:
    """Captures full backward hooks of modules, and those that come before them."""
    return exchanged(torch_modules, BackwardHook=_ModuleHooks)


def _changed(hook: Hook, gradient: torch.Tensor) -> torch.Tensor:
    before = gradient._version
    found = hook(gradient)
    if found is None and gradient._version == before:
        raise _LooksError
    return gradient if found is None else found


def _hooked(
    tensors: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    change: Callable[[_Gradients, _Gradients], Sequence[Any]],
) -> list[torch.Tensor]:
    """Makes the operator that stands between tensors and what reads them.

    Args:
        tensors: those whose gradients are changed.
        others: tensors of the kinds that the results are to be of.
        change: takes the gradients of `tensors` and of the results, and gives the first ones anew.
    """
    count = len(tensors)

    def change_first(*gradients: torch.Tensor) -> Sequence[Any]:
        return change(gradients[:count], gradients[count:])

    hooked = _function(HOOKED, count, change_first, others)
    found = apply_captured(hooked, tuple(tensors), {}, is_kept=True)  # until it is in its place
    return list(found[count:])


def _function(
    name: str,
    count: int,
    change: Callable[..., Sequence[Any]],
    others: Sequence[torch.Tensor] = (),
) -> type:
    """One that gives copies of its first arguments, and zeros of the kinds of some tensors.

    Its backward gives the gradients of all arguments, from those of all results.
    """

    class Copying(Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            zeros = (inputs[0].new_zeros(other.shape, dtype=other.dtype) for other in others)
            return *(x.clone() for x in inputs[:count]), *zeros

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(change(*gradients))

    Copying.__name__ = name
    return Copying


class _ModuleHooks:
    """Stands in for torch's class of this interface while a step is captured.

    Hooks are given the gradients of a module's results together with those of its arguments. So
    the operator of the arguments has further results, which those of the module pass their
    gradients to.
    """

    def __init__(self, module: nn.Module, hooks: Sequence[Any], pre_hooks: Sequence[Any]):
        self._module, self._hooks, self._pre_hooks = module, hooks, pre_hooks
        self._args: tuple[Any, ...] = ()
        self._places: list[int] = []

    def setup_input_hook(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gives the arguments that the module is to be called with."""
        self._places = _differentiable(args)
        self._args = args
        if self._places and self._hooks:
            # Tensors that nothing else reads.
            copying = _function("passed", len(self._places), lambda *gradients: gradients)
            passed = apply_captured(copying, tuple(args[i] for i in self._places), {})
            self._args = tuple(_filled(args, self._places, passed))
        return self._args

    def setup_output_hook(self, results: Any) -> Any:
        """Gives the results that the module is to return."""
        found = results if isinstance(results, tuple) else (results,)
        places = _differentiable(found)
        if not places:
            return results
        given = [found[i] for i in places]
        links = self._hook_arguments(found, places) if self._hooks else []
        if links or self._pre_hooks:
            given = self._hook_results(given, links, len(found), places)
        filled = _filled(found, places, given)
        return type(results)(filled) if isinstance(results, tuple) else filled[0]

    def _hook_arguments(self, results: Sequence[Any], places: Sequence[int]) -> list[torch.Tensor]:
        """Has the hooks change gradients of arguments; gives what takes those of results."""

        def change(inputs: _Gradients, outputs: _Gradients) -> list[torch.Tensor]:
            given: Any = tuple(_filled([None] * len(self._args), self._places, inputs))
            last = tuple(_filled([None] * len(results), places, outputs))
            given = self._called(
                self._hooks, lambda hook, now: hook(self._module, now, last), given
            )
            return [given[i] for i in self._places]

        if self._places:  # else PyTorch lets such a hook change nothing
            inputs = [self._args[i] for i in self._places]
            with contextlib.suppress(_LooksError):
                return _hooked(inputs, [results[i] for i in places], change)
        _tell_of_looks(self._name("full backward hook"))
        return []

    def _hook_results(
        self,
        given: Sequence[torch.Tensor],
        links: Sequence[torch.Tensor],
        num_results: int,
        places: Sequence[int],
    ) -> list[torch.Tensor]:
        """Has the hooks that come before change the gradients of results, which `links` get too."""

        def change(*gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
            now: Any = tuple(_filled([None] * num_results, places, gradients))
            try:
                now = self._called(self._pre_hooks, lambda hook, g: hook(self._module, g), now)
            except _LooksError:
                _tell_of_looks(self._name("backward pre-hook"))
            ends = tuple(now[i] for i in places)
            return ends + ends if links else ends

        return list(apply_captured(_function("ended", len(given), change), (*given, *links), {}))

    def _called(self, hooks: Sequence[Any], call: Callable[[Any, Any], Any], given: Any) -> Any:
        """What hooks make of gradients, one after the other."""
        is_changed = not hooks
        for hook in hooks:
            found = call(hook, given)
            if found is None:
                continue
            found = found if isinstance(found, tuple) else (found,)
            if len(found) != len(given):
                raise CaptureError(
                    f"A backward hook of {type(self._module).__name__} gives {len(found)} "
                    f"gradients in place of {len(given)}."
                )
            given, is_changed = found, True
        if not is_changed:
            raise _LooksError
        return given

    def _name(self, kind: str) -> str:
        return f"the {kind} of a {type(self._module).__name__}"


def _differentiable(values: Sequence[Any]) -> list[int]:
    """Places of tensors that have a gradient."""
    if not torch.is_grad_enabled():
        return []
    tensors = [(i, v) for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
    return [i for i, value in tensors if value.requires_grad]


def _filled(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Values with others in some places."""
    filled = [*values]
    for place, other in zip(places, others, strict=True):
        filled[place] = other
    return filled


def _tell_of_looks(what: str) -> None:
    """Says that a hook is left out; it has no part in what is computed."""
    warn_once(
        f"hook {what}{at_user_line()}",
        f"{what} changes no gradient. It is not called when the step runs, at most once with "
        f"placeholders while it is captured: such gradients stay inside of compiled programs. "
        f"To see one, return torch.autograd.grad(loss, x, retain_graph=True) from the step "
        f"function.",
    )


class _Handle:
    """What `register_hook` returns in a step function."""

    def __init__(self, is_late: Callable[[], bool]):
        self._is_late = is_late

    def remove(self) -> None:
        """After `model.backward` the hook has been called, as in PyTorch.

        Raises:
            CaptureError: before that.
        """
        if not self._is_late():
            raise CaptureError(
                f"A hook was removed in a step function{at_user_line()} before model.backward. "
                f"Do not register it."
            )
