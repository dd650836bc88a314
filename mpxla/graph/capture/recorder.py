"""What a step function that is captured asks for: backwards, and values that are to be shown."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.python.number import is_number
from mpxla.graph.python.recorded import Recording
from mpxla.graph.stepgraph import Check
from mpxla.graph.user_code import at_user_line

__all__ = ["BackwardRecorder", "autograd_nodes", "current_recorder", "recording_to"]


@dataclass
class BackwardRecorder:
    """What `model.backward` was asked to differentiate while a step function is captured.

    Also what `smp.debug_print` is to show when the step runs, with a label, and what is to be true
    then, with the user's line.

    Attributes:
        recording: numbers that the step leaves in Python.
        is_known: says whether a tensor follows from inputs alone.
        is_constant: says whether it is the same in every call, while others are changing.
        note_backward: called with the tensors when `model.backward` is.
        is_trial: whether the step will not run, and may ask for gradients where there are none.
        stand_in: gives what stands for a parameter of the model, and others as they are.
        trained: the tensors that stand for those that require gradients.
    """

    is_known: Callable[[torch.Tensor], bool]
    is_constant: Callable[..., bool]
    note_backward: Callable[[Sequence[torch.Tensor]], None]
    is_trial: bool = False
    stand_in: Callable[[Any], Any] = lambda value: value
    trained: Sequence[torch.Tensor] = ()
    objectives: list[torch.Tensor] = field(default_factory=list)
    prints: list[tuple[str, torch.Tensor, Check | None]] = field(default_factory=list)
    recording: Recording = field(default_factory=Recording)

    @classmethod
    def of_nothing(cls) -> "BackwardRecorder":
        """For a run in plain PyTorch, of which only what it does besides is wanted."""
        return cls(lambda _: False, lambda *_: False, lambda _: None, is_trial=True)

    def show(self, tensor: Any, label: str) -> None:
        """Makes the value that a tensor has here a result of the step."""
        if is_number(tensor):
            tensor = tensor.tensor
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(
                f"smp.debug_print was given {type(tensor).__name__}{at_user_line()}; give it a "
                f"tensor: the one that .item() was called on, for a number."
            )
        # A copy, which what is written to the tensor afterwards does not reach.
        self.prints.append((label, tensor.detach().clone(), None))

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Records the scalars whose gradients add up to what the call asks for.

        A non-scalar `tensor` with gradient `g` contributes `sum(tensor * g)`.
        """
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self.note_backward(tensors)
        if grad_tensors is None or isinstance(grad_tensors, torch.Tensor):
            grads = [grad_tensors] * len(tensors)
        else:
            grads = list(grad_tensors)
        if len(grads) != len(tensors):
            raise CaptureError(
                f"model.backward got {len(tensors)} tensors and {len(grads)} gradients"
                f"{at_user_line()}; give one gradient (or None) for each tensor."
            )
        for tensor, grad in zip(tensors, grads, strict=True):
            if self.trained and _is_of_nothing_trained(tensor):
                # A gradient of zeros, where torch has none: the graph has to lead somewhere.
                never = torch.zeros((), dtype=torch.bool)
                zero = torch.where(never, self.trained[0].sum(), 0.0).to(tensor.dtype)
                tensor = tensor.detach() + zero
            self.objectives.append(_objective(tensor, grad, self.is_trial))


def _is_of_nothing_trained(loss: torch.Tensor) -> bool:
    """Whether a loss is computed from scalars alone that the step has made to require gradients:
    `torch.tensor(0.0, requires_grad=True)`, where there is nothing to train on.
    """
    if loss.is_leaf:
        return loss.requires_grad and _is_made(loss)
    nodes = autograd_nodes([loss])
    ends = (node for node in nodes if not any(source for source, _ in node.next_functions))
    return all(_is_made(getattr(node, "variable", None)) for node in ends)


def _is_made(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and not isinstance(leaf, nn.Parameter)


def autograd_nodes(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The graph by which autograd would differentiate."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [other for other, _ in node.next_functions]
            yield node


def _objective(tensor: torch.Tensor, grad: torch.Tensor | None, is_trial: bool) -> torch.Tensor:
    if not tensor.requires_grad and not is_trial:
        raise CaptureError(
            f"model.backward was called on a tensor that no parameter contributed to"
            f"{at_user_line()}. Check that the loss is computed from the model's output, outside "
            f"torch.no_grad(), without .detach() or .item() on the way."
        )
    if grad is None:
        if tensor.numel() != 1:
            raise CaptureError(
                f"model.backward was called on a tensor of shape {list(tensor.shape)} without a "
                f"gradient{at_user_line()}. Reduce the loss to a scalar, or pass grad_tensors."
            )
        return tensor.sum()
    if grad.shape != tensor.shape:
        raise CaptureError(
            f"model.backward got a gradient of shape {list(grad.shape)} for a tensor of shape "
            f"{list(tensor.shape)}{at_user_line()}; the shapes must be equal."
        )
    return (tensor * grad.detach()).sum()


_recorder: BackwardRecorder | None = None


def current_recorder() -> BackwardRecorder | None:
    """The recorder of the capture that runs now, or None outside of captures."""
    return _recorder


@contextlib.contextmanager
def recording_to(recorder: BackwardRecorder) -> Generator[None]:
    """Makes a recorder the current one; captures do not nest."""
    global _recorder
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = None
