"""Objects that a step function makes in its first call and keeps: a model's criterion, say.

    if self.criterion is None:
        self.criterion = DetectionLoss(self)    # which makes tables: torch.arange(...)

A capture has no tensors with values. So where all of those that such an object holds are constants,
the object gets them with their values, and the place gets the object before the step is captured
once more. From there on it is an object as any other that is held.

This module must not know how a step is captured.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from mpxla.graph.python.held_objects import Held, contents_of, has_attributes
from mpxla.graph.user_code import AgainError

__all__ = ["keep_made"]

_MOST_PARTS = 5000


class _MadeError(AgainError):
    """A step function has made an object that is to be there before."""

    def __init__(self, held: Held, key: str, made: Any):
        super().__init__(f"{held.name}.{key}")
        self._place, self._made = (held, key), made

    def prepare(self) -> None:
        """Puts it there."""
        held, key = self._place
        held.made.add(key)  # once: what is taken away when it was used would come again
        setattr(held.value, key, self._made)


def keep_made(
    value: Any,
    held: Mapping[int, Held],
    place: tuple[int, str],
    value_of: Callable[[torch.Tensor], torch.Tensor | None],
) -> None:
    """Has an object that a step has made kept, with values for its tensors, if it has all.

    Args:
        value: given to an attribute that has had nothing.
        held: objects of before, by the id of their attributes.
        place: the id of the attributes, and the name.
        value_of: gives the value of a tensor of the capture; None if it is no constant.

    Raises:
        AgainError: it is kept, and the step is to be captured again.
    """
    owner = held.get(place[0])
    if owner is None or place[1] in owner.made or not _is_open(value) or id(vars(value)) in held:
        return
    found: list[tuple[Any, Any, Any]] = []
    waiting, seen, is_kept = [value], set[int](), isinstance(value, nn.Module)
    for part in waiting:  # grows
        if len(waiting) > _MOST_PARTS:
            return
        table = vars(part) if _is_open(part) else part
        for key, inner in (contents_of(table) or {}).items():
            known = held.get(id(vars(inner))) if _is_open(inner) else None
            if isinstance(inner, FakeTensor):
                real = value_of(inner)
                if real is None or isinstance(table, tuple):
                    return
                found.append((table, key, real))
                is_kept = True
            elif known is not None and not isinstance(table, tuple):
                found.append((table, key, known.value))  # export gives modules by proxies
            elif id(inner) not in seen and (_is_open(inner) or contents_of(inner)):
                seen.add(id(inner))
                waiting.append(inner)
    if is_kept:
        for table, key, real in found:
            table[key] = real
        raise _MadeError(owner, place[1], value)


def _is_open(value: Any) -> bool:
    return isinstance(value, nn.Module) or has_attributes(value)
