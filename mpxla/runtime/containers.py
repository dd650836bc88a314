"""Containers that pytree does not know, opened so that the tensors inside are leaves.

A mapping like a tokenizer's output, a set, or an object that `smp_slice` made holds inputs of the
step. As a leaf its tensors would be taken for constants of the program.
This module must not know about steps or ranks.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import nn

__all__ = ["flatten_opened", "open_containers", "open_object"]


@dataclass(frozen=True)
class _Opened:
    """A container in the form that pytree can walk; unflattening gives the container again."""

    kind: type
    keys: tuple[Any, ...]
    values: list[Any]


def flatten_opened(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure of what `open_containers` gives."""
    leaves, structure = pytree.tree_flatten(tree)
    if any(isinstance(leaf, Mapping | AbstractSet) for leaf in leaves):
        return pytree.tree_flatten(open_containers(tree))
    return leaves, structure


def open_containers(tree: Any) -> Any:
    """The same structure, in which mappings and sets of any type are nodes of the tree."""

    def opened(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return _open(leaf, dict(leaf))
        if isinstance(leaf, AbstractSet):
            return _open(leaf, dict(enumerate(leaf)))
        return leaf

    # Opened ones stay: mapping over a node would close it again.
    leaves, structure = pytree.tree_flatten(tree, is_leaf=lambda node: isinstance(node, _Opened))
    if not any(isinstance(leaf, Mapping | AbstractSet) for leaf in leaves):
        return tree  # as nearly always: to build it anew takes as long as to look
    return pytree.tree_unflatten(map(opened, leaves), structure)


def open_object(value: Any) -> Any:
    """An object whose attributes hold tensors as a node of the tree; all else as it is."""
    attributes = getattr(value, "__dict__", None)
    if not attributes or not pytree.tree_is_leaf(value) or isinstance(value, (nn.Module, Mapping)):
        return value
    leaves = pytree.tree_leaves(open_containers(attributes))
    is_data = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return _open(value, attributes) if is_data and not isinstance(value, torch.Tensor) else value


def _open(container: Any, items: Mapping[Any, Any]) -> _Opened:
    return _Opened(type(container), tuple(items), [open_containers(v) for v in items.values()])


def _close(values: Iterable[Any], context: tuple[type, tuple[Any, ...]]) -> Any:
    kind, keys = context
    if issubclass(kind, AbstractSet):
        return kind(values)  # type: ignore[call-arg]
    items = dict(zip(keys, values, strict=True))
    if issubclass(kind, Mapping):
        return kind(items)  # type: ignore[call-arg]
    made = object.__new__(kind)
    made.__dict__.update(items)
    return made


def _flatten(opened: _Opened) -> tuple[list[Any], tuple[type, tuple[Any, ...]]]:
    return opened.values, (opened.kind, opened.keys)


def _flatten_with_keys(
    opened: _Opened,
) -> tuple[list[tuple[pytree.KeyEntry, Any]], tuple[type, tuple[Any, ...]]]:
    keys = [cast(pytree.KeyEntry, pytree.MappingKey(key)) for key in opened.keys]
    return list(zip(keys, opened.values, strict=True)), (opened.kind, opened.keys)


pytree.register_pytree_node(
    _Opened,
    _flatten,
    _close,
    serialized_type_name="mpxla.runtime.containers._Opened",
    flatten_with_keys_fn=_flatten_with_keys,
)
