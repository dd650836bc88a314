"""Parameters of which a rank has a part, where a step uses them outside of their layers.

A layer that is split computes with its part. What else uses its weights means the whole ones, as
they are in plain PyTorch: a penalty on all parameters, a head that multiplies by the table of an
embedding. It gets them, put together of the parts of all ranks:

    forward of the layer     weight (a part)
    any other code           weight (a part) -> gather -> [its blocks in order] -> whole weight

The derivative of the gather is this rank's part of the gradient, so nothing else is to be done.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._ops import HigherOrderOperator

from mpxla.errors import CaptureError
from mpxla.graph.capture.writes import is_write
from mpxla.graph.collectives import SHARDS, gather_parts, own_part
from mpxla.graph.user_code import at_user_line

__all__ = ["WholeParameters"]

_OF_THE_PART = frozenset(
    (
        *("grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
        *("requires_grad_", "detach_", "rename_", "share_memory_"),
        *("__deepcopy__", "__hash__", "__delete__"),
    )
)
"""Functions that are about the parameter itself, not about its values."""
_OF_VALUES = frozenset(("shape", "data", "T", "mT", "H", "mH", "real", "nbytes"))
"""Attributes that are about its values."""


class WholeParameters:
    """Those of one capture.

    Args:
        model: has stand-ins as its parameters.

    Attributes:
        running: the layers that run, the innermost last.
        found: what was put together so far; nothing may write to it.
    """

    def __init__(self, model: nn.Module):
        self._shards: dict[int, Any] = {}
        self._layers: dict[int, set[int]] = {}
        self.running: list[nn.Module] = []
        self.found: dict[int, torch.Tensor] = {}
        for layer in model.modules():
            for name, shard in vars(layer).get(SHARDS, {}).items():
                stand_in = layer._parameters[name]  # pyright: ignore[reportPrivateUsage]
                self._shards[id(stand_in)] = shard
                self._layers.setdefault(id(stand_in), set()).add(id(vars(layer)))

    def given(
        self, call: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a function of torch with whole parameters where it takes their values.

        `call` calls a function of torch with arguments and keyword arguments.
        """
        if not self._shards or isinstance(func, HigherOrderOperator):
            return args, kwargs
        name = getattr(func, "__name__", "").removesuffix(".default")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name not in _OF_VALUES:
                return args, kwargs
        if name in _OF_THE_PART:
            return args, kwargs
        kept = args[:1] if is_write(name) or name == "__set__" else ()
        if any(map(self._is_split, pytree.tree_leaves(kept))):
            self._refuse()

        def placed(value: Any) -> Any:
            if self._is_split(value):
                found = call(gather_parts, _along(value, self._shards[id(value)]), {})
                self.found[id(found)] = found
                return found
            shard = self._shard_of_layer(value)
            return value if shard is None else call(own_part, _along(value, shard), {})

        with torch.enable_grad():  # what is called may yet be without
            args = (*kept, *pytree.tree_map(placed, args[len(kept) :]))
            return args, {key: pytree.tree_map(placed, value) for key, value in kwargs.items()}

    def _is_split(self, value: Any) -> bool:
        """Whether it is a split parameter, and no layer that has it computes just now."""
        layers = self._layers.get(id(value))
        return layers is not None and not (self.running and id(vars(self.running[-1])) in layers)

    def _shard_of_layer(self, value: Any) -> Any:
        """Which part a split layer needs of what `functional_call` gives it; None for others."""
        layer = vars(self.running[-1]) if self.running else {}
        for name, shard in layer.get(SHARDS, {}).items():
            is_whole = id(value) not in self._shards and value is layer["_parameters"].get(name)
            if is_whole and value.shape == shard.whole:
                return shard
        return None

    def check_write(self, owner: torch.Tensor) -> None:
        """Checks that a tensor that is written to, or the one whose memory it shares, is none.

        Raises:
            CaptureError: it is one.
        """
        if id(owner) in self.found:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise CaptureError(
            f"The step function writes to a parameter of which every rank of a tensor-parallel "
            f"group has a part{at_user_line()}. Write to it between steps (where it is the part), "
            f"or leave its module whole: smp.set_tensor_parallelism(module, False)."
        )

    def release(self) -> None:
        """Lets go of tensors."""
        self.found.clear()
        self._shards.clear()
        self._layers.clear()


def _along(value: torch.Tensor, shard: Any) -> tuple[Any, ...]:
    return value, shard.dim, shard.size, shard.index, shard.blocks
