"""Writes into a tensor that autograd does not see: under `no_grad`, to `x.data`, to `x.detach()`.

In PyTorch the value changes, and gradients go the way that they went before. The functional graph
of a step has its derivatives from the operators in it: so the new value is written with what is
zero and has the gradient of the old one. For parameters see `contents.py`.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils.weak import WeakTensorKeyDictionary

from mpxla.errors import CaptureError
from mpxla.graph.capture.contents import Contents
from mpxla.graph.capture.flags import Flags
from mpxla.graph.user_code import at_user_line

__all__ = ["HiddenWrites", "described", "is_write"]

_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_WRITES = frozenset(["__setitem__", *(f"__i{name}__" for name in _OPERATORS)])
_NO_WRITES = frozenset(["requires_grad_", "detach_", "rename_", "share_memory_"])
_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # pyright: ignore


def is_write(name: str) -> bool:
    """Whether a function of torch with this name writes to its first argument."""
    is_named_so = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
    return is_named_so and name not in _NO_WRITES


class HiddenWrites:
    """Calls torch for a step that is captured.

    Args:
        call: calls a function of torch with arguments and keyword arguments.
        flags: of the model's parameters.
        check: raises for tensors whose memory must not be written to.

    Attributes:
        contents: of tensors that hold something else now.
        outside: tensors that are no buffers or parameters of a model, and are written to, with the
            user's lines and the values before, in order.
    """

    def __init__(
        self, call: Callable[..., Any], flags: Flags, check: Callable[[torch.Tensor], None]
    ):
        self._call, self._flags, self._check = call, flags, check
        self.contents = Contents(call, flags)
        self.outside: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        self._copied: Any = WeakTensorKeyDictionary()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls what `__torch_function__` is given."""
        name = getattr(func, "__name__", "").removesuffix(".default")
        if func == _SET_DATA:
            self._note_outside(args[0])
            return self._set_data(*args)
        if getattr(func, "__module__", "") == "torch.nn.init" and "tensor" in kwargs:
            rest = {key: value for key, value in kwargs.items() if key != "tensor"}
            self._note_outside(kwargs["tensor"])
            return self._write(func, (kwargs["tensor"],), rest)
        if name.startswith("_foreach_") and name.endswith("_"):
            each = getattr(torch.Tensor, name.removeprefix("_foreach_"), None)
            if each is not None:
                return self._write_each(each, args, kwargs)
        if func == _GET_DATA or name == "detach":
            found = self.contents.detached(args[0])
            if args[0] in self._copied:
                self._copied[found] = self._copied[args[0]]
            return found
        if name == "detach_" and args[0].requires_grad and not args[0].is_leaf:
            with torch.enable_grad():  # what is written has no gradient
                self._call(torch.Tensor.copy_, (args[0], args[0].detach()), {})
        if is_write(name) and args and isinstance(args[0], torch.Tensor):
            self._note_outside(args[0])
            return self._write(func, args, kwargs)
        if name == "batch_norm":
            self._note_outside(args[1] if len(args) > 1 else kwargs.get("running_mean"))
        if isinstance(out := kwargs.get("out"), torch.Tensor) and self._owner(out).requires_grad:
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
            return self._write(torch.Tensor.copy_, (out, self.call(func, args, kwargs)), {})
        args, kwargs = self.contents.read((args, kwargs), func)
        found = self._call(func, args, kwargs)
        if name == "clone" and self._owner(args[0]) not in self.contents:
            self._copied[found] = self._owner(args[0])
        return found

    def is_copy(self, tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
        """Whether a tensor has the values that a parameter had when the step began."""
        return self._copied.get(tensor) is self._flags.of(parameter) and tensor._version == 0

    def _note_outside(self, written: Any) -> None:
        """Notes the line that writes to a tensor which is there besides the step."""
        # Tensors of the step and of its models have no values, but for those made of numbers.
        kinds = torch.Tensor, torch.nn.Parameter
        if isinstance(written, torch.Tensor) and type(owner := self._owner(written)) in kinds:
            with _disable_current_modes(), DisableTorchFunction():
                self.outside.append((owner, at_user_line(), owner.detach().clone()))

    def restore(self) -> None:
        """Gives such tensors their values of before: some writes are done at once."""
        with torch.no_grad():
            for tensor, _, before in reversed(self.outside):
                tensor.copy_(before)

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written, owner = args[0], self._owner(args[0])
        self._check(owner)
        rest, kwargs = self.contents.read((args[1:], kwargs), func)
        # A frozen parameter may be written to like any tensor without a gradient.
        is_seen = torch.is_grad_enabled() and (written.requires_grad or owner is written)
        is_seen = is_seen and not self._flags.is_frozen(owner)
        if is_seen and owner.requires_grad:
            self.contents.settle(owner)
        if is_seen or not owner.requires_grad:
            return self._call(func, (self.contents.data(written), *rest), kwargs)
        if owner.is_leaf or owner in self.contents:
            self.contents.begin(owner)
            shared = self._owner(self.contents.memory(owner))
            is_kept = shared is not owner and shared.requires_grad and not shared.is_leaf
            with self._gradient_kept(shared) if is_kept else contextlib.nullcontext():
                self._change(func, self.contents.data(written), rest, kwargs)
            return written
        with self._gradient_kept(owner):
            self._change(func, written, rest, kwargs)
        return written

    @contextlib.contextmanager
    def _gradient_kept(self, owner: torch.Tensor) -> Generator[None]:
        """Gives a tensor, when its memory was written to, the gradient that it had before."""
        with torch.enable_grad():
            before = owner.clone()
        yield
        with torch.enable_grad():
            new = owner.detach().clone()
            self._call(torch.Tensor.copy_, (owner, new + (before - before.detach())), {})

    def _write_each(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Calls for every tensor of a list what `torch._foreach_add_` and others do with all."""
        for place in range(len(args[0])):

            def own(given: Any, place: int = place) -> Any:
                return given[place] if isinstance(given, (list, tuple)) else given

            self.call(func, tuple(map(own, args)), {k: own(v) for k, v in kwargs.items()})

    def _change(self, func: Any, written: torch.Tensor, rest: Any, kwargs: dict[str, Any]) -> None:
        # To a view: a region under `no_grad` detaches what it gives, and would give the tensor.
        self._call(func, (written.view_as(written), *rest), kwargs)

    def _owner(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with a gradient whose memory a view or a detached tensor shares."""
        while True:
            base = tensor if tensor._base is None else tensor._base
            found = self.contents.origins.get(base, base)
            if found is tensor:
                return tensor
            tensor = found

    def _set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        value = self.contents.data(value)
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise CaptureError(
                f"The step function gives a tensor data of another shape or dtype"
                f"{at_user_line()}: {described(value)} in place of {described(tensor)}. A "
                f"captured step writes to tensors of their shape: compute with a tensor of its own "
                f"(weight = f(self.weight), and a functional call)."
            )
        self.contents.give(tensor, value)


def described(tensor: torch.Tensor | None) -> str:
    """What a message says of a tensor."""
    if tensor is None:
        return "None"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
