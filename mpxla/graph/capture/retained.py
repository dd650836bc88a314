"""Gradients of tensors in a step function: `x.grad`, `backward(inputs=[x])` and `retain_grad()`.

Those of parameters are the step's own, and complete when it has run. A tensor that the step makes,
or an input that requires gradients, has its gradient there: by a backward of its own, as the value
of `torch.autograd.grad`. Adversarial examples (PGD, FGSM, VAT) and saliency are made so.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import (
    _is_torch_function_mode_enabled,  # pyright: ignore[reportPrivateUsage]
    handle_torch_function,
)
from torch.utils.weak import WeakTensorKeyDictionary

from mpxla.graph.capture.flags import Flags
from mpxla.graph.exchanged import exchanged
from mpxla.graph.gradients import as_tuple

__all__ = ["BACKWARD", "Retained", "backward_told"]

_gradient: Any = torch.Tensor.grad
_GET, _SET = _gradient.__get__, _gradient.__set__
BACKWARD: tuple[Any, ...] = (torch.Tensor.backward, torch.autograd.backward)


class Retained:
    """Those of one captured step.

    Args:
        flags: of the model's parameters.
        differentiate: does what `torch.autograd.grad` does.
        losses: gives those whose backward was called so far, for the parameters.
    """

    def __init__(
        self,
        flags: Flags,
        differentiate: Callable[..., Sequence[torch.Tensor | None]],
        losses: Callable[[], Sequence[torch.Tensor]],
    ):
        self._flags, self._differentiate, self._losses = flags, differentiate, losses
        # The gradient of a tensor, and how many losses are in it already.
        self._kept: Any = WeakTensorKeyDictionary()

    def takes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call of torch is about such gradients only."""
        if func in BACKWARD:
            leaves = kwargs.get("inputs")
            return leaves is not None and all(map(self._keeps, as_tuple(leaves)))
        return func is torch.Tensor.retain_grad or (func in (_GET, _SET) and self._keeps(args[0]))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does what a call does that is taken."""
        if func in BACKWARD:
            return self._backward(*args, **kwargs)
        tensor = args[0]
        if func is torch.Tensor.retain_grad:
            if not tensor.requires_grad:
                raise RuntimeError("can't retain_grad on Tensor that has requires_grad=False")
            if not tensor.is_leaf:  # leaves keep their gradient anyway
                self._kept.setdefault(tensor, (None, 0))
            return None
        if func == _SET:
            self._kept[tensor] = args[1], len(self._losses())
            return None
        return self._gradient_of(tensor)

    def _keeps(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is no parameter, and keeps its gradient."""
        if tensor in self._kept:
            return True
        is_leaf = type(tensor) is FakeTensor and tensor.requires_grad and tensor.is_leaf
        return is_leaf and self._flags.of(tensor) is None

    def _gradient_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Of the losses so far; None without a part in them."""
        losses = self._losses()
        gradient, count = self._kept.get(tensor, (None, 0))
        new = [loss for loss in losses[count:] if loss.requires_grad]
        if new:
            (found,) = self._differentiate(new, tensor, retain_graph=True, allow_unused=True)
            gradient = _sum(gradient, found)
        self._kept[tensor] = gradient, len(losses)
        return gradient

    def _backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = (),
        gradient: Any = None,
    ) -> None:
        """As `torch.autograd.backward` and, with `gradient`, the method of tensors."""
        leaves = as_tuple(inputs)
        seeds = next((v for v in (grad_tensors, grad_variables, gradient) if v is not None), None)
        keys = {"create_graph": create_graph, "allow_unused": True}
        found = self._differentiate(tensors, leaves, seeds, retain_graph, **keys)
        for leaf, new in zip(leaves, found, strict=True):
            known, count = self._kept.get(leaf, (None, 0))
            self._kept[leaf] = _sum(known, new), count


def _sum(known: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    if known is None or new is None:
        return new if known is None else known
    with torch.no_grad():
        return known.add_(new)  # in place, as PyTorch does: the script may hold it


@contextlib.contextmanager
def backward_told() -> Generator[None]:
    """Tells modes of `torch.autograd.backward`; torch tells them of the method of tensors only.

    Where it comes to the engine, since scripts may have imported the function itself.
    """
    module: Any = torch.autograd
    original = module._engine_run_backward

    def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not (kwargs.get("accumulate_grad") and _is_torch_function_mode_enabled()):
            return original(tensors, *args, **kwargs)
        *given, leaves = args
        return handle_torch_function(
            module.backward, tensors, tensors, *given, inputs=leaves or None
        )

    with exchanged(module, _engine_run_backward=run):
        yield
