"""The structure of a step's arguments as data, for the other ranks of a pipeline.

A pytree specification refers to classes and to contexts that any class may choose. What travels is
names and data. The receiver puts the structure together from its own arguments, which are normally
built alike, and where they are not (dummies), from containers that pytree knows there and classes
that it has imported. Nothing is imported or called for a message.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree

from mpxla.comm.codec import can_travel, find_class, register
from mpxla.errors import RankMismatch

__all__ = ["Structure", "describe_structure", "rebuild_structure"]


@register
@dataclass(frozen=True)
class _Named:
    """A class or function, by its name."""

    module: str
    qualname: str

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"


@register
@dataclass(frozen=True)
class _Opaque:
    """Something that is no data, by its words."""

    text: str

    def __str__(self) -> str:
        return self.text


@register
@dataclass(frozen=True)
class Structure:
    """One node of a pytree, as data.

    Attributes:
        kind: type of the container; None for a leaf.
        context: what the container has besides its children, with names in place of classes.
        children: its children.
    """

    kind: _Named | None
    context: Any
    children: tuple["Structure", ...]


def describe_structure(spec: pytree.TreeSpec) -> Structure:
    """The structure as data."""
    if spec.is_leaf():
        return Structure(None, None, ())
    children = tuple(map(describe_structure, _children(spec)))
    return Structure(_name_of(spec.type), _portable(spec.context), children)


def rebuild_structure(structure: Structure, own: pytree.TreeSpec | None) -> pytree.TreeSpec:
    """The inverse of `describe_structure`, on another rank.

    `own` is that of this rank's own arguments at the same place, if they have any there.

    Raises:
        RankMismatch: a container is not known here.
    """
    if structure.kind is None:
        return pytree.tree_structure(0)
    count = len(structure.children)
    own_children: list[Any] = [None] * count
    if own is not None and len(_children(own)) == count:
        own_children = _children(own)
    children = [
        rebuild_structure(child, mine)
        for child, mine in zip(structure.children, own_children, strict=True)
    ]
    if own is not None and not own.is_leaf() and _name_of(own.type) == structure.kind:
        return pytree.TreeSpec(own.type, _resolve(structure.context, own.context), children)
    return pytree.TreeSpec(_find_kind(structure.kind), _resolve(structure.context), children)


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """Its children; torch 2.9 has no method for them, and 2.13 warns of their old name."""
    tree: Any = spec
    return tree.children() if hasattr(tree, "children") else tree.children_specs


def _name_of(value: Any) -> _Named:
    return _Named(str(value.__module__), str(value.__qualname__))


def _portable(context: Any) -> Any:
    if type(context) in (tuple, list):
        return type(context)(_portable(part) for part in context)
    if type(context) is dict:
        return {key: _portable(part) for key, part in context.items()}
    if hasattr(context, "__module__") and hasattr(context, "__qualname__"):
        return _name_of(context)
    return context if can_travel(context) else _Opaque(repr(context))


def _resolve(context: Any, own: Any = None) -> Any:
    """The context, with this rank's own parts where they are the same."""
    if _portable(own) == context:
        return own
    if type(context) in (tuple, list):
        mine = own if type(own) is type(context) and len(own) == len(context) else ()
        pairs = itertools.zip_longest(context, mine)
        return type(context)(_resolve(part, part_of_own) for part, part_of_own in pairs)
    if type(context) is dict:
        mine = own if type(own) is dict else {}
        return {key: _resolve(part, mine.get(key)) for key, part in context.items()}
    if isinstance(context, _Opaque):
        raise _unknown(context)
    if isinstance(context, _Named):
        found = find_class(context.module, context.qualname)
        if found is None:
            raise _unknown(context)
        return found
    return context


def _find_kind(name: _Named) -> Any:
    for kind in pytree.SUPPORTED_NODES:
        if _name_of(kind) == name:
            return kind
    raise _unknown(name)


def _unknown(what: _Named | _Opaque) -> RankMismatch:
    return RankMismatch(
        f"pp_rank 0 passes a container with {what} to the step function, which is not in this "
        f"rank's arguments at that place, nor known here by that name. Call the step function with "
        f"the same arguments on all ranks (tensors may be dummies on pipeline ranks above 0), or "
        f"import the container's class on all of them before; or pass a plain dictionary."
    )
