"""Objects that a step function makes in its first call and keeps: a model's criterion, say.

    if self.criterion is None:
        self.criterion = DetectionLoss(self)    # which makes tables: torch.arange(...)

A capture has no tensors with values. So where all of those that such an object holds are constants,
the object gets them with their values, and the place gets the object before the step is captured
once more. From there on it is an object as any other that is held.

What is made in its place then goes by something else than the place (`if not self.is_built: ...`),
and may have been made of what stood there. The place has nothing again before the next capture.

This module must not know how a step is captured.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import getitem, setitem
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from mpxla.graph.python.held_objects import Held, contents_of, has_attributes
from mpxla.graph.python.plain import MISSING, Read
from mpxla.graph.user_code import AgainError

__all__ = ["fakes_in", "keep_made"]

_MOST_PARTS = 5000


def keep_made(
    value: Any,
    before: Any,
    held: Mapping[int, Held],
    place: tuple[int, str],
    value_of: Callable[[torch.Tensor], torch.Tensor | None],
) -> None:
    """Has an object that a step has made kept, with values for its tensors, if it has all.

    Args:
        value: given to an attribute.
        before: what the attribute has had.
        held: objects of before, by the id of their attributes.
        place: the id of the attributes, and the name.
        value_of: gives the value of a tensor of the capture; None if it is no constant.

    Raises:
        AgainError: it is kept, or what was kept there is gone; the step is to be captured again.
    """
    owner = held.get(place[0])
    if owner is None:
        return
    if place[1] in owner.made:
        if before is owner.made[place[1]][0] and value is not before:
            raise AgainError(f"{owner.name}.{place[1]}", partial(_take_away, owner, place[1]))
        return
    if before is not None or (_is_open(value) and id(vars(value)) in held):
        return
    if not (_is_open(value) or _is_mixed(value)):
        return
    entries = _entries_in(value, held)
    if entries is None:
        return
    found: list[tuple[Any, Any, Any]] = []
    is_kept = isinstance(value, nn.Module)
    for table, key, inner in entries:
        known = _held_of(inner, held)
        if isinstance(inner, FakeTensor):
            real = value_of(inner)
            if real is None or isinstance(table, tuple):
                return
            found.append((table, key, real))
            is_kept = True
        elif known is not None and not isinstance(table, tuple):
            found.append((table, key, known.value))  # export gives modules by proxies
    if is_kept:
        for table, key, real in found:
            table[key] = real
        raise AgainError(f"{owner.name}.{place[1]}", partial(_put, owner, place[1], value))


def fakes_in(value: Any) -> list[Read]:
    """Places in an object that have got tensors of a capture."""
    entries = _entries_in(value, {}) or []
    return [
        Read(f"{key}", None, partial(getitem, table, key), put=partial(setitem, table, key))
        for table, key, inner in entries
        if isinstance(inner, FakeTensor) and not isinstance(table, tuple)
    ]


def _entries_in(value: Any, held: Mapping[int, Held]) -> list[tuple[Any, Any, Any]] | None:
    """What is in an object, but not in those that are held: what holds it, and under which key.

    None if that is too much.
    """
    found: list[tuple[Any, Any, Any]] = []
    waiting, seen = [value], set[int]()
    for part in waiting:  # grows
        if len(waiting) > _MOST_PARTS:
            return None
        table = vars(part) if _is_open(part) else part
        for key, inner in (contents_of(table) or {}).items():
            found.append((table, key, inner))
            is_end = _held_of(inner, held) is not None and not isinstance(table, tuple)
            if is_end or isinstance(inner, FakeTensor) or id(inner) in seen:
                continue
            if _is_open(inner) or contents_of(inner):
                seen.add(id(inner))
                waiting.append(inner)
    return found


def _held_of(value: Any, held: Mapping[int, Held]) -> Held | None:
    return held.get(id(vars(value))) if _is_open(value) else None


def _put(held: Held, key: str, made: Any) -> None:
    """Has an object there before the step makes it."""
    held.made[key] = made, getattr(held.value, key, MISSING)
    setattr(held.value, key, made)


def _take_away(held: Held, key: str) -> None:
    """Puts back what was there; the entry stays, so that the place is not filled again."""
    before = held.made[key][1]
    if before is MISSING:
        delattr(held.value, key)
    else:
        setattr(held.value, key, before)


def _is_mixed(value: Any) -> bool:
    """Whether it is a container of tensors and of others, by which microbatches may count."""
    if type(value) not in (dict, list):
        return False
    leaves = pytree.tree_leaves(value)
    are_tensors = [isinstance(leaf, FakeTensor) for leaf in leaves]
    return any(are_tensors) and not all(are_tensors)


def _is_open(value: Any) -> bool:
    return isinstance(value, nn.Module) or has_attributes(value)
