"""Writes into a tensor that autograd does not see: under `no_grad`, to `x.data`, to `x.detach()`.

In PyTorch the value changes, and gradients go the way that they went before. The functional graph
of a step has its derivatives from the operators in it: so the new value is written with what is
zero and has the gradient of the old one. Parameters are not written to; see `functional_step`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mpxla.errors import CaptureError
from mpxla.graph.user_code import at_user_line

__all__ = ["HiddenWrites"]

_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_WRITES = frozenset(["__setitem__", *(f"__i{name}__" for name in _OPERATORS)])
_NO_WRITES = frozenset(["requires_grad_", "detach_", "rename_", "share_memory_"])
_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # pyright: ignore


class HiddenWrites:
    """Calls torch for a step that is captured.

    Args:
        call: calls a function of torch with arguments and keyword arguments.
    """

    def __init__(self, call: Callable[..., Any]):
        self._call = call
        self._origins: Any = WeakTensorKeyDictionary()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls what `__torch_function__` is given."""
        name = getattr(func, "__name__", "").removesuffix(".default")
        if func == _SET_DATA:
            return self._set_data(*args)
        if func == _GET_DATA or name == "detach":
            found = self._call(torch.Tensor.detach, args[:1], {})
            self._origins[found] = args[0]
            return found
        if name == "detach_" and args[0].requires_grad and not args[0].is_leaf:
            with torch.enable_grad():  # what is written has no gradient
                self._call(torch.Tensor.copy_, (args[0], args[0].detach()), {})
        is_write = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        if is_write and name not in _NO_WRITES and args and isinstance(args[0], torch.Tensor):
            return self._write(func, args, kwargs)
        return self._call(func, args, kwargs)

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = self._owner(args[0])
        is_seen = torch.is_grad_enabled() and (args[0].requires_grad or owner is args[0])
        if is_seen or owner.is_leaf or not owner.requires_grad:
            return self._call(func, args, kwargs)
        with torch.enable_grad():
            before = owner.clone()
        # To a view: a region under `no_grad` detaches what it gives, and would give the tensor.
        view = args[0].view_as(args[0])
        self._call(func, (view, *args[1:]), kwargs)
        with torch.enable_grad():
            new = owner.detach().clone()
            self._call(torch.Tensor.copy_, (owner, new + (before - before.detach())), {})
        return args[0]

    def _owner(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with a gradient whose memory a view or a detached tensor shares."""
        while True:
            base = tensor if tensor._base is None else tensor._base
            found = self._origins.get(base, base)
            if found is tensor:
                return tensor
            tensor = found

    def _set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        is_parameter = tensor.is_leaf and tensor.requires_grad
        if is_parameter or (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            what = "a parameter" if is_parameter else "a tensor of another shape or dtype"
            raise CaptureError(
                f"The step function gives {what} other data{at_user_line()}. A captured step "
                f"reads parameters, and writes to tensors of their shape: compute with a tensor of "
                f"its own (weight = f(self.weight), and a functional call), or change the "
                f"parameter between step calls."
            )
        with torch.no_grad():
            self.call(torch.Tensor.copy_, (tensor, value), {})
