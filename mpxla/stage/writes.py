"""Writes into tensors that an operator has just made, as results of their own.

Derivatives that PyTorch writes in C++ have such writes: `1 - sigmoid(x)` in that of `silu` fills a
new tensor with ones and subtracts from it in place, `norm` and `max` mask and scatter likewise.
"""

from collections.abc import Container
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from mpxla.graph.typed import input_of, schema_of

__all__ = ["replace_writes"]

_aten = torch.ops.aten


def replace_writes(module: fx.GraphModule, decomposed: Container[Any]) -> bool:
    """Makes a traced program functional, in place, without operators that would be decomposed.

    Returns:
        False: it writes otherwise than into new tensors of which there are no views, or with
        operators that have no functional twin. Some writes may have been replaced.
    """
    if not any(map(_is_write, module.graph.nodes)):
        return True
    _collapse_detaches(module.graph)
    nodes = list(module.graph.nodes)
    order = {node: index for index, node in enumerate(nodes)}
    for node in nodes:
        if not _is_write(node):
            continue
        written = input_of(node)
        twin = _twin(module.graph, node, decomposed) if _is_alone(written) else None
        if twin is None:
            return False
        order[twin] = order[node]
        node.replace_all_uses_with(twin)
        written.replace_all_uses_with(twin, lambda user, t=twin: order[user] > order[t])
        module.graph.erase_node(node)
    module.recompile()
    return True


def _collapse_detaches(graph: fx.Graph) -> None:
    """Takes out what gives its argument: nothing is differentiated any more."""
    for node in graph.find_nodes(op="call_function", target=_aten.detach.default):
        node.replace_all_uses_with(input_of(node))
        graph.erase_node(node)


def _is_write(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node).is_mutable


def _is_alone(value: Any) -> bool:
    """Whether a value is a new tensor that nothing shares memory with, but for writes into it."""
    if not isinstance(value, fx.Node) or not isinstance(value.target, OpOverload):
        return False
    readers = [user for user in value.users if user.op != "output" and not _is_write(user)]
    return not _aliases(value) and not any(map(_aliases, readers))


def _aliases(node: fx.Node) -> bool:
    """Whether an operator may give memory of its arguments."""
    if not isinstance(node.target, OpOverload):
        return True
    return any(result.alias_info is not None for result in schema_of(node).returns)


def _functional(operator: Any) -> Any:
    """The overload that takes the same arguments and writes to none; its name may be another."""
    packet = getattr(_aten, operator._schema.name.removeprefix("aten::").removesuffix("_"), None)
    if packet is None:
        return None
    names = [operator._overloadname, *packet.overloads()]
    found = [overload for n in names if (overload := getattr(packet, n, None)) is not None]
    kinds = _kinds(operator)
    return next((o for o in found if _kinds(o) == kinds and not o._schema.is_mutable), None)


def _kinds(operator: Any) -> list[str]:
    return [str(argument.type) for argument in operator._schema.arguments]


def _twin(graph: fx.Graph, node: fx.Node, decomposed: Container[Any]) -> fx.Node | None:
    """Inserts what gives the value that a write leaves behind."""
    target, value = node.target, node.meta["val"]
    assert isinstance(target, OpOverload)
    args: tuple[Any, ...] = node.args
    kwargs = dict(node.kwargs)
    if target is _aten.fill_.Scalar:
        found: Any = _aten.full.default
        args = (list(value.shape), args[1])
        kwargs = {"dtype": value.dtype, "device": value.device}
    else:
        schema = schema_of(node)
        found = _functional(target)
        writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        if found is None or found in decomposed or writes != [True] + [False] * (len(writes) - 1):
            return None
        known = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        result = found(*known[0], **known[1])
        if (result.shape, result.dtype) != (value.shape, value.dtype):
            return None  # a write keeps the dtype of what it writes to
    with graph.inserting_before(node):
        twin = graph.call_function(found, args, kwargs)
    twin.meta = dict(node.meta)
    return twin
