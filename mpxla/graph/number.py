"""A Python float that is an input of a captured step: it computes like a float, with tensors too.

The value is not known while the step is captured, so that one program serves all values. Code that
needs the value in Python (a branch, `math.exp`, the probability of a dropout) raises; the step is
then captured again with the value as a constant.
This module must not know how a step is captured or run.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

__all__ = ["Number"]


class Number:
    """Stands for a float argument of the step function; its tensor is float64 of shape [].

    Arithmetic with Python numbers is done in float64, as Python does. Together with tensors it has
    the dtype that a Python number would lead to.
    """

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    @property
    # Code that asks `isinstance(x, float)` goes on as before.
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return float

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Calls an operator of torch with tensors of the right dtype in the place of numbers."""
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        dtype = _common_dtype(tensors)
        if func.__name__.strip("_") in _EXACT:
            dtype = _exact_dtype(dtype, tensors)

        def as_tensor(leaf: Any) -> Any:
            return leaf.tensor.to(dtype) if type(leaf) is Number else leaf

        args, kwargs = pytree.tree_map(as_tensor, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    def __neg__(self) -> "Number":
        return Number(-self.tensor)

    def __pos__(self) -> "Number":
        return self

    def __abs__(self) -> "Number":
        return Number(self.tensor.abs())

    def __repr__(self) -> str:
        return "<a float that is an input of the step>"


def _common_dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    """What a Python float becomes beside these tensors."""
    if not tensors:
        return torch.float64
    dtype = tensors[0].dtype
    for other in tensors[1:]:
        dtype = torch.promote_types(dtype, other.dtype)
    is_inexact = dtype.is_floating_point or dtype.is_complex
    return dtype if is_inexact else torch.get_default_dtype()


def _exact_dtype(dtype: torch.dtype, tensors: list[torch.Tensor]) -> torch.dtype:
    """Arithmetic of 16-bit tensors takes a Python float in float32, without rounding it first."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_half and any(t.dim() for t in tensors) else dtype


_EXACT = frozenset(
    prefix + name for name in ("add", "sub", "mul", "truediv", "div") for prefix in ("", "r", "i")
)


def _arithmetic(function: Callable[[Any, Any], Any], is_reflected: bool) -> Callable[..., Any]:
    def method(self: Number, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            dtype = _exact_dtype(_common_dtype([other]), [other])
            operands: tuple[Any, ...] = (self.tensor.to(dtype), other)
        elif type(other) is Number:
            operands = (self.tensor, other.tensor)
        elif type(other) in (bool, int, float):
            operands = (self.tensor, other)
        else:
            return NotImplemented
        result = function(*(reversed(operands) if is_reflected else operands))
        return result if isinstance(other, torch.Tensor) else Number(result)

    return method


def _needs_value(name: str) -> Callable[..., Any]:
    def method(self: Number, *_: Any) -> Any:
        raise TypeError(f"the value of {self!r} is needed in Python, by {name}")

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _function = getattr(operator, _name)
    setattr(Number, f"__{_name}__", _arithmetic(_function, is_reflected=False))
    setattr(Number, f"__r{_name}__", _arithmetic(_function, is_reflected=True))
for _name in (
    *("bool", "float", "int", "complex", "index", "round", "trunc", "floor", "ceil", "hash"),
    *("lt", "le", "gt", "ge", "eq", "ne", "str", "format"),
):
    setattr(Number, f"__{_name}__", _needs_value(f"__{_name}__"))
