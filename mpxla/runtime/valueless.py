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

    # Attributes are read in loops over all parameters: they are as quick as those of any tensor.
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # pyright: ignore[reportPrivateUsage]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls an operator; see the module."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            _check_writes(func, args, kwargs)
        with torch._C._DisableTorchDispatch():  # pyright: ignore[reportPrivateUsage]
            result = func(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, _marked, result)


class AbsentParameter(Valueless, nn.Parameter):
    """Stands in a module for a parameter of another pipeline rank."""


def _marked(result: torch.Tensor) -> torch.Tensor:
    if type(result) is not torch.Tensor or result.device.type != "meta":
        return result
    return result.as_subclass(Valueless)


def _check_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises where a tensor with values would be written from one without."""
    written: list[Any] = []
    sources: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        (written if argument.is_write else sources).append(value)
    for target in written:
        if isinstance(target, (list, tuple)):
            # `torch._foreach_add_(targets, others)` writes to each from its own.
            for i, one in enumerate(target):
                own = [s[i] if isinstance(s, (list, tuple)) else s for s in sources]
                _check_write(func, one, own)
        else:
            _check_write(func, target, sources)


def _check_write(func: Any, target: torch.Tensor, sources: Sequence[Any]) -> None:
    if target.device.type != "meta" and any(
        isinstance(source, Valueless) for source in pytree.tree_leaves(sources)
    ):
        name = func._schema.name.removeprefix("aten::")
        raise StepError(
            f"{name} writes to a tensor of this rank from a parameter that has no values here "
            f"at {at_script_line()}: they are on another pipeline rank, or divided over ranks, and "
            f"nothing would come of it. Use tensors of one rank only (skip parameters whose device "
            f"is meta; smp.partition puts modules that belong together on one partition), make two "
            f"models of it, each in a DistributedModel, or read whole values from "
            f"model.state_dict()."
        )
