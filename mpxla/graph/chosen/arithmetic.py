"""What steps compute of how many rows a mask chooses, with tensors in the place of numbers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

__all__ = ["ARITHMETIC", "HERE", "POWERS"]

_aten = torch.ops.aten
HERE: Mapping[str, Any] = {"device": torch.device("cpu")}
"""Where new tensors are."""
_Call = Callable[..., fx.Node]
"""Makes a node that calls an operator with arguments."""


def _divided(call: _Call, one: Any, other: Any) -> Any:
    if not isinstance(one, fx.Node):
        one = call(_aten.scalar_tensor.default, one, dtype=torch.float64, **HERE)
    return call(_aten.div.Tensor, call(_aten.to.dtype, one, torch.float64), other)


def _floored(call: _Call, one: Any, other: Any) -> Any:
    if not isinstance(one, fx.Node):
        one = call(_aten.scalar_tensor.default, one, dtype=torch.int64, **HERE)
    return call(_aten.div.Tensor_mode, one, other, rounding_mode="floor")


def _powered(call: _Call, one: Any, other: Any) -> Any:
    return call(_aten.pow.Tensor_Scalar, call(_aten.to.dtype, one, torch.float64), other)


def _tensors_first(operator: Any, with_tensors: Any = None) -> Callable[[_Call, Any, Any], Any]:
    """For two tensors there may be another operator."""

    def compute(call: _Call, one: Any, other: Any) -> Any:
        one, other = (one, other) if isinstance(one, fx.Node) else (other, one)
        both = with_tensors if isinstance(other, fx.Node) else None
        return call(both or operator, one, other)

    return compute


POWERS = ("Pow", "FloatPow", "PowByNatural")
"""Of which the first operand has to be a tensor."""
ARITHMETIC: Mapping[str, Callable[[_Call, Any, Any], Any]] = {
    "Add": _tensors_first(_aten.add.Tensor),
    "Mul": _tensors_first(_aten.mul.Tensor),
    "IntTrueDiv": _divided,
    "FloatTrueDiv": _divided,
    "FloorDiv": _floored,
    "CleanDiv": _floored,
    **dict.fromkeys(POWERS, _powered),
    "Max": _tensors_first(_aten.clamp_min.default, _aten.maximum.default),
    "Min": _tensors_first(_aten.clamp_max.default, _aten.minimum.default),
}
"""Numbers by the names of their expressions; one operand is a tensor."""
