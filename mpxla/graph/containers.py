"""Containers that pytree does not know, opened so that the tensors inside are leaves.

A mapping like a tokenizer's output, a set, or an object that `smp_slice` made holds inputs of the
step, a dataclass its results. As a leaf its tensors would be taken for constants of the program.
This module must not know about steps or ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from mpxla.errors import CaptureError
from mpxla.graph.python.number import Later, holds_objects, is_number, values_in
from mpxla.graph.python.plain import slots_of

__all__ = [
    "flatten_opened",
    "has_fakes",
    "has_tensors",
    "holds_numbers",
    "is_open",
    "open_containers",
    "open_object",
    "open_results",
    "refuse_hidden_tensors",
    "with_other_tensors",
]


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
    return _opened(tree, (_in_mapping, _in_set))


def open_object(value: Any) -> Any:
    """As `open_containers`; objects whose attributes hold tensors are nodes too."""
    return _opened(value, (_in_mapping, _in_set, _in_object))


def open_results(tree: Any) -> Any:
    """What a step returns or leaves, in which mappings are nodes of the tree, and objects that hold
    tensors or numbers.

    Sets stay leaves: numbers become lists over microbatches, which no set can hold.
    """
    return _opened(tree, (_in_mapping, _in_object))


def refuse_hidden_tensors(leaf: Any) -> None:
    """Raises CaptureError where a leaf of results still holds tensors of the step, or numbers."""
    if isinstance(leaf, nn.Module):
        return
    is_set = isinstance(leaf, AbstractSet)
    items = dict(enumerate(leaf)) if is_set else getattr(leaf, "__dict__", {})
    held = [str(k) for k, v in items.items() if isinstance(v, torch.Tensor) or is_number(v)]
    if held:
        kind = type(leaf).__name__
        raise CaptureError(
            f"The step function returns an object of type {kind} that holds tensors "
            f"({', '.join(held)}). Return them in a tuple, list, dict, named tuple, dataclass, or "
            f"a class registered with torch.utils._pytree.register_pytree_node."
        )


_NEW = object.__new__, SimpleNamespace.__new__
"""Of classes whose objects hold nothing but attributes."""
_NO_DATA = nn.Module, torch.optim.Optimizer
"""Objects that a step may return and leave, but not others of their kind with other tensors."""
_Kind = Callable[[Any], dict[Any, Any] | None]


def _opened(tree: Any, kinds: Sequence[_Kind]) -> Any:
    """Opens what one of `kinds` finds items in, each object once; not what is in itself."""
    known: dict[int, tuple[Any, Any]] = {}  # with the objects, whose ids others must not get

    def opened(leaf: Any) -> Any:
        items = next((found for kind in kinds if (found := kind(leaf)) is not None), None)
        if items is None:
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = leaf, leaf
            node = _Opened(type(leaf), tuple(items), [*map(walked, items.values())])
            is_container = isinstance(leaf, Mapping | AbstractSet)
            if is_container or any(map(_is_data, pytree.tree_leaves(node))):
                known[id(leaf)] = leaf, node
        return known[id(leaf)][1]

    def walked(tree: Any) -> Any:
        # Opened ones stay: mapping over a node would close it again.
        leaves, structure = pytree.tree_flatten(tree, is_leaf=lambda n: isinstance(n, _Opened))
        new = [opened(leaf) for leaf in leaves]
        if all(leaf is before for leaf, before in zip(new, leaves, strict=True)):
            return tree  # as nearly always: to build it anew takes as long as to look
        return pytree.tree_unflatten(new, structure)

    return walked(tree)


def _in_mapping(leaf: Any) -> dict[Any, Any] | None:
    return dict(leaf) if isinstance(leaf, Mapping) else None


def _in_set(leaf: Any) -> dict[Any, Any] | None:
    return dict(enumerate(leaf)) if isinstance(leaf, AbstractSet) else None


def _in_object(leaf: Any) -> dict[Any, Any] | None:
    """Attributes of an object that consists of them; None for what is more, or no data."""
    kind = type(leaf)
    is_more = isinstance(leaf, (*_NO_DATA, torch.Tensor, Later, _Opened)) or is_number(leaf)
    if is_more or kind.__new__ not in _NEW:
        return None
    names = [name for name in slots_of(kind) if name not in ("__dict__", "__weakref__")]
    held = {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}
    return held | getattr(leaf, "__dict__", {})


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or is_open(leaf)


def is_open(leaf: Any) -> bool:
    """Whether it has no value while a step is captured: of a tensor, or what Python makes of it."""
    if isinstance(leaf, str):
        return bool(values_in(leaf))
    return is_number(leaf) or isinstance(leaf, (FakeTensor, Later)) or holds_numbers(leaf)


def holds_numbers(value: Any) -> bool:
    """Whether it is an array of numbers without values."""
    return holds_objects(value) and any(map(is_number, value.flat))


def _close(values: Iterable[Any], context: tuple[type, tuple[Any, ...]]) -> Any:
    kind, keys = context
    if issubclass(kind, AbstractSet):
        return kind(values)  # type: ignore[call-arg]
    items = dict(zip(keys, values, strict=True))
    if issubclass(kind, Mapping):
        return kind(items)  # type: ignore[call-arg]
    made = cast(Any, kind).__new__(kind)
    for key, value in items.items():
        object.__setattr__(made, key, value)  # the class itself may allow none: frozen dataclasses
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
    serialized_type_name="mpxla.graph.containers._Opened",
    flatten_with_keys_fn=_flatten_with_keys,
)


def with_other_tensors(value: Any, filling: float = 0.5) -> Any:
    """A container, or a tensor, with others in the place of those of a capture; None of others."""
    count = 0

    def other(leaf: Any) -> Any:
        nonlocal count
        if not isinstance(leaf, FakeTensor):
            return leaf
        count += 1
        return torch.full(tuple(map(int, leaf.shape)), filling).to(leaf.dtype)

    with _disable_current_modes():
        found = pytree.tree_map(other, value)
    return found if count else None


def has_tensors(value: Any) -> bool:
    """Whether something is a tensor, or holds one."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def has_fakes(value: Any) -> bool:
    """Whether something is a tensor of a capture, or holds one."""
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))
