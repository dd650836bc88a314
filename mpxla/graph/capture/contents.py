"""What a tensor holds in a step function that exchanges that where autograd does not see it.

In PyTorch a parameter then has other values, and gradients go to the parameter by these: by
`weight.data.clamp_()` it gets those of the clamped weight. In the functional graph the parameter is
an input. So what reads it afterwards is given the new values, plus the difference of the parameter
and itself, which is zero and has the gradient.

`tensor.data = new` leaves the old memory to those who hold it. So from then on the tensor is read
where `new` is; when the function has run, parameters and buffers are written to, which makes their
values results of the graph. Where a parameter is written to between its use and the backward, see
`later_values`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from mpxla.errors import CaptureError
from mpxla.graph.capture.flags import Flags
from mpxla.graph.gradients import LEAF
from mpxla.graph.later_values import LATER
from mpxla.graph.user_code import at_user_line

__all__ = ["Contents"]

_GIVE_VIEWS = [getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")]


class Contents:
    """Of tensors whose contents were exchanged so far.

    Args:
        call: calls a function of torch with arguments and keyword arguments.
        flags: of the model's parameters.

    Attributes:
        has_backward: whether the step has called backward.
        origins: detached tensors -> what they share their memory with.
    """

    def __init__(self, call: Callable[..., Any], flags: Flags):
        self._call, self._flags = call, flags
        self.has_backward = False
        self.origins: Any = WeakTensorKeyDictionary()
        self._data: Any = WeakTensorKeyDictionary()
        self._before: Any = WeakTensorKeyDictionary()
        self._first: Any = WeakTensorKeyDictionary()
        self._times_given: Any = WeakTensorKeyDictionary()
        self._memory: Any = WeakTensorKeyDictionary()
        self._reads: Any = WeakTensorKeyDictionary()
        self._at_backward: Any = WeakTensorKeyDictionary()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self._data

    def data(self, tensor: torch.Tensor) -> torch.Tensor:
        """What has the memory of a tensor now, without its gradient if they were exchanged."""
        return self._data.get(tensor, tensor)

    def detached(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor.detach()`."""
        found = self._call(torch.Tensor.detach, (self.data(tensor),), {})
        self.origins[found] = tensor
        self.note_alias(found, tensor)
        return found

    def begin(self, tensor: torch.Tensor) -> None:
        """Before the values of a tensor are changed."""
        if tensor not in self._data:
            with torch.enable_grad():
                self._before[tensor] = tensor.clone()
            if tensor.requires_grad and tensor not in self._first:
                with torch.no_grad():
                    self._first[tensor] = LEAF(tensor, True)
            self._data[tensor] = tensor.detach()

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor where it is differentiated by: writes give it other values."""
        return self._first.get(tensor, tensor)

    def give(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """`tensor.data = data`."""
        if self.memory(tensor) is self.memory(data):
            return  # as by `tensor.data += x`
        self.begin(tensor)
        held = self._data[tensor] = data.detach()
        self.origins[held] = data  # by views of it they are written to
        self._memory[tensor] = self.memory(data)
        self._times_given[tensor] = self._times_given.get(tensor, 0) + 1

    def memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor whose memory it was first; the same for those that share it by `.data`."""
        return self._memory.get(tensor, tensor)

    def note_alias(self, alias: torch.Tensor, tensor: torch.Tensor) -> None:
        """`alias = tensor.data`."""
        self._memory[alias] = self.memory(tensor)

    def settle(self, tensor: torch.Tensor) -> None:
        """Before a write that autograd sees."""
        if tensor in self._data:
            with torch.enable_grad():
                self._call(torch.Tensor.copy_, (tensor, self._value(tensor)), {})
            del self._data[tensor], self._before[tensor]

    def read(self, arguments: Any, func: Any = None) -> Any:
        """Arguments of a function of torch, with the values that they have now."""
        if getattr(func, "__name__", "") == "__get__" and func not in _GIVE_VIEWS:
            return arguments  # it is looked at
        return pytree.tree_map_only(torch.Tensor, self._value, arguments)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        # In this order: `is_leaf` of a view that was made under `no_grad` may be an error.
        needs_gradient = torch.is_grad_enabled() and tensor.requires_grad
        if not needs_gradient:
            return self._data.get(tensor, tensor)
        if self._flags.is_frozen(tensor):
            return self.detached(tensor)
        if tensor in self._data:
            before = self._before[tensor]
            value = self._data[tensor].detach() + (before - before.detach())
            self._note_read(tensor, value)
            return value
        if tensor.is_leaf:
            self._note_read(tensor, tensor)
        base = tensor._base
        detached = tensor if base is None else base
        if detached in self.origins and not detached.is_leaf:
            raise CaptureError(
                f"The step function uses a detached tensor to which it has written a value with a "
                f"gradient{at_user_line()}. Write to a copy (x.detach().clone()), or write "
                f"value.detach()."
            )
        if base is not None and base.is_leaf and base in self._data:
            raise CaptureError(
                f"The step function uses a view of a parameter that it has written to since it "
                f"took the view{at_user_line()}. Take the view after the write."
            )
        return tensor

    def _note_read(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if tensor.grad_fn is None:
            self._reads.setdefault(tensor, []).append((self._version(tensor), value))

    def _version(self, tensor: torch.Tensor) -> tuple[int, int]:
        return self._times_given.get(tensor, 0), self.data(tensor)._version

    def note_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        """Before a backward from some tensors.

        Remembers what derivatives read of parameters that were written to since their use.
        """
        self.has_backward = True
        self._flags.note_backward(tensors)
        for tensor in self._data:
            reads, now = self._reads.get(tensor, ()), self._version(tensor)
            before = self._before[tensor]  # in the place of what was read before any write
            found = [(v, before if r is tensor else r) for v, r in reads if v != now]
            given = [read for version, read in found if version[0] != now[0]]
            others = [read for version, read in found if version[0] == now[0]]
            if found:
                value = self._data[tensor].detach().clone()
                self._at_backward[tensor] = value, [*given, *others], len(given)

    def finish(self, state: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Writes to parameters and buffers what they hold.

        Args:
            state: all parameters and buffers, each once.

        Returns:
            Parameters that are trained and written to.

        Raises:
            CaptureError: two of them would share their memory from now on.
        """
        held: dict[int, torch.Tensor] = {}
        for tensor in state:
            other = held.setdefault(id(self.memory(tensor)), tensor)
            if other is not tensor:
                raise CaptureError(
                    f"The step function gives a parameter or buffer of shape {list(tensor.shape)} "
                    f"the memory of another one (tensor.data = other.data), so that each change of "
                    f"one would change both. Copy the values: tensor.data.copy_(other.data)."
                )
        written = [tensor for tensor in held.values() if tensor in self._data]
        if not written:  # export splits and joins the graph of every step that has a region
            return []
        with torch.no_grad():
            # Copies first: they may have exchanged their memory.
            values = [self._data[tensor].clone() for tensor in written]
            for tensor, value in zip(written, values, strict=True):
                if tensor in self._at_backward:
                    value = LATER(value, *self._at_backward[tensor])
                self._call(torch.Tensor.copy_, (tensor, value), {})
        return [tensor for tensor in written if tensor.requires_grad]
