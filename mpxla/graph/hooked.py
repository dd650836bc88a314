"""Operators that stand between tensors and what reads them, so that hooks see all of the gradient.

An operator of a hook is traced where the hook was registered. In the functional graph it comes to
stand between its tensor and all that reads it, before that place as well: PyTorch calls a hook with
the sum of the gradients of all readers.

This module must not know how a step is traced.
"""

import operator
from collections.abc import Sequence

import torch
from torch import fx

from mpxla.errors import CaptureError
from mpxla.graph.functions import traced_function
from mpxla.graph.gradients import is_differentiated_by
from mpxla.graph.split import ancestors
from mpxla.graph.stepgraph import InputKind, InputRole, describe
from mpxla.graph.typed import arguments_of
from mpxla.graph.user_code import line_of

__all__ = ["HOOKED", "place_hooks"]

HOOKED = "mpxla_hooked"
"""Name of the functions whose operators stand between their first arguments and other readers."""

_clone, _detach = torch.ops.aten.clone.default, torch.ops.aten.detach.default


def place_hooks(graph: fx.Graph, inputs: Sequence[InputRole]) -> None:
    """Lets what reads a hooked tensor read it from the operator of the hook.

    Args:
        graph: functional; it is changed in place.
        inputs: role of every placeholder.

    Raises:
        CaptureError: a hook computes with something that depends on its own tensor.
    """
    roles = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    # The hook that was registered first is called first, so it comes last in the forward.
    for node in reversed(list(graph.nodes)):
        function = traced_function(node.target)
        if function is not None and function.name == HOOKED:
            tensors = arguments_of(node)[0][: sum(function.is_differentiated)]
            _place(graph, node, tensors, roles)


def _place(
    graph: fx.Graph, hook: fx.Node, tensors: Sequence[fx.Node], roles: dict[fx.Node, InputRole]
) -> None:
    before = ancestors(hook.all_input_nodes)
    parts = {part.args[1]: part for part in hook.users}
    ends = [hook, *sorted(parts.values())]
    moved: set[fx.Node] = set()
    for number, tensor in enumerate(tensors):
        readers = [user for twin in _twins(tensor, roles) for user in twin.users]
        readers = [user for user in dict.fromkeys(readers) if user is not hook]
        if not readers:
            continue
        if number not in parts:
            with graph.inserting_after(ends[-1]):
                parts[number] = graph.call_function(operator.getitem, (hook, number))
            parts[number].meta = {**hook.meta, "val": tensor.meta["val"]}
            ends.append(parts[number])
        for user in readers:
            if is_differentiated_by(user, tensor):
                continue  # what PyTorch gives for it has been through the hooks
            if user in before:
                _check_reader(user, hook)
                continue
            for twin in _twins(tensor, roles):
                user.replace_input_with(twin, parts[number])
            moved.add(user)
    if not moved:
        for part in [*parts.values(), hook]:
            if not part.users:
                graph.erase_node(part)
    elif all(tensor.op == "placeholder" for tensor in tensors):
        _sink(ends, moved)
    else:
        _move_behind(ends, moved)


def _twins(tensor: fx.Node, roles: dict[fx.Node, InputRole]) -> list[fx.Node]:
    """The tensor, and other inputs that are the same parameter by another name."""
    role = roles.get(tensor)
    if role is None or role.kind is not InputKind.PARAMETER:
        return [tensor]
    return [node for node, other in roles.items() if other == role]


def _check_reader(user: fx.Node, hook: fx.Node) -> None:
    """What a hook computes with may read the tensor as it is, if no gradient comes back."""
    value = user.meta.get("val")
    if user.target is _clone and all(reader.target is _detach for reader in user.users):
        return
    if isinstance(value, torch.Tensor) and value.is_floating_point() and user.target is not _detach:
        raise CaptureError(
            f"A hook on a gradient{line_of(hook)} computes with {describe(user)}, which depends on "
            f"the tensor that the hook is on. Give it x.detach() there."
        )


def _sink(ends: Sequence[fx.Node], readers: set[fx.Node]) -> None:
    """Moves the operator of a parameter's hook to the first reader, whose module it belongs to."""
    first = min(readers)
    for node in ends:
        first.prepend(node)
        node.meta = {**node.meta, "nn_module_stack": first.meta.get("nn_module_stack", {})}


def _move_behind(ends: Sequence[fx.Node], moved: set[fx.Node]) -> None:
    """Moves nodes that read results of an operator, and what reads those, behind it."""
    last = stop = max(ends)
    node = min(moved)
    while node < stop:
        following = node.next
        if node not in ends and (node in moved or not moved.isdisjoint(node.all_input_nodes)):
            moved.add(node)
            last.append(node)
            last = node
        node = following
