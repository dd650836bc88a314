"""Tensors that have a shape on this rank and their values on others.

PyTorch's device `meta` takes part in any operator, without a word: `target.add_(source)` leaves
`target` as it is if `source` is on another rank. So what is computed from such a parameter knows
it, and writing it to a tensor with values is an error. The other way is none: a rank that copies
start values into all parameters sets its own.

This module must not know where the values are.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from mpxla.errors import StepError
from mpxla.user_lines import at_script_line

__all__ = ["AbsentParameter", "Valueless"]


class Valueless(torch.Tensor):
    """A parameter of other ranks, or what is computed from one."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls torch; see the module."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_write = name.endswith("_") and not name.endswith("__")
        if "out" in kwargs:
            others = (value for key, value in kwargs.items() if key != "out")
            _check_write(name, kwargs["out"], (*args, *others))
        elif args and (is_write or name in _OPERATORS_IN_PLACE):
            _check_write(name, args[0], (*args[1:], *kwargs.values()))
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            result = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, _marked, result)


class AbsentParameter(Valueless, nn.Parameter):
    """Stands in a module for a parameter of another pipeline rank."""


_OPERATORS_IN_PLACE = frozenset(f"__i{name}__" for name in "add sub mul truediv floordiv".split())


def _marked(result: torch.Tensor) -> torch.Tensor:
    if type(result) is not torch.Tensor or result.device.type != "meta":
        return result
    return result.as_subclass(Valueless)


def _check_write(name: str, targets: Any, sources: Sequence[Any]) -> None:
    """Raises where a tensor with values would be written from one without."""
    if isinstance(targets, (list, tuple)):
        # `torch._foreach_add_(targets, others)` writes to each from its own.
        for place, target in enumerate(targets):
            own = [s[place] if isinstance(s, (list, tuple)) else s for s in sources]
            _check_write(name, target, own)
        return
    is_lost = isinstance(targets, torch.Tensor) and targets.device.type != "meta"
    if is_lost and any(isinstance(s, Valueless) for s in pytree.tree_leaves(sources)):
        raise StepError(
            f"{name} writes to a tensor of this rank from a parameter that has no values here "
            f"at {at_script_line()}: they are on another pipeline rank, or divided over ranks, and "
            f"nothing would come of it. Use tensors of one rank only (skip parameters whose device "
            f"is meta; smp.partition puts modules that belong together on one partition), make two "
            f"models of it, each in a DistributedModel, or read whole values from "
            f"model.state_dict()."
        )
