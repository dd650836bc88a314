"""Random numbers for values that are split over ranks.

All ranks of a tensor-parallel group run equal programs with one seed, so that what they draw for
equal values is equal. For a split value each would draw the same numbers as the others for their
parts; so a program draws the numbers of all parts, and keeps those of its own:

    seed -> [rank 0 | rank 1]     rank 0 keeps the first, rank 1 the second

That costs as many draws as there are ranks, and no second seed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpxla.errors import LoweringError

__all__ = ["drawing_own_part"]

_aten = torch.ops.aten
_LIKE = (
    *(_aten.bernoulli.default, _aten.bernoulli.p, _aten.rand_like.default),
    _aten.randn_like.default,
)
"""Operators whose result is drawn element by element, with the shape of their argument."""


def drawing_own_part(target: Callable[..., Any], index: int, size: int) -> Callable[..., Any]:
    """What runs in the place of an operator, or of its stand-in, that draws for a split value."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _OwnPart(index, size):
            return target(*args, **kwargs)

    run.__name__ = str(getattr(target, "__name__", target)).replace(".", "_")
    return run


class _OwnPart(TorchDispatchMode):
    """Draws for all ranks wherever something is drawn."""

    def __init__(self, index: int, size: int):
        super().__init__()
        self._index, self._size = index, size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        value = args[0]
        if func is _aten.native_dropout.default and not args[2]:
            return func(*args, **kwargs)
        if func is _aten.native_dropout.default:
            ones = torch.ones_like(self._of_all(value))
            mask = func(ones, *args[1:], **kwargs)[1].select(0, self._index)
            scale = 0.0 if args[1] == 1 else 1.0 / (1.0 - args[1])
            return value * mask * scale, mask
        if func in _LIKE:
            return func(self._of_all(value), *args[1:], **kwargs).select(0, self._index)
        if func.name().partition(".")[0].endswith("_"):  # fills its argument
            drawn = func(torch.empty_like(self._of_all(value)), *args[1:], **kwargs)
            return value.copy_(drawn.select(0, self._index))
        raise LoweringError(
            f"{func.name()} draws for a value that is split over ranks, in a way that mpxla cannot "
            f"divide. Use dropout or torch.rand_like, or leave the module whole "
            f"(smp.set_tensor_parallelism(module, False))"
        )

    def _of_all(self, value: torch.Tensor) -> torch.Tensor:
        return value.unsqueeze(0).expand(self._size, *value.shape).contiguous()
