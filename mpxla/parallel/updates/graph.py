"""The graph of an optimizer's update, in which equal parameters are traced once.

A model has few kinds of parameters: of each kind one is traced, and its part of the graph is copied
for the others. That is right only where a parameter's update depends on nothing but itself, which
is known of torch's own optimizers; others are traced as a whole.
"""

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module  # pyright: ignore[reportPrivateUsage]

from mpxla.device.backend import Backend, Lowering
from mpxla.graph.fingerprint import UnknownValueError, described, fingerprint, torch_settings
from mpxla.graph.portable import dumped, loaded
from mpxla.graph.typed import outputs_of
from mpxla.kept import Kept, key_of
from mpxla.parallel.updates.elementwise import ELEMENTWISE
from mpxla.parallel.updates.python import own_attributes
from mpxla.parallel.updates.slots import NOT_CONSTANT, Arrangement
from mpxla.parallel.updates.stochastic_rounding import Origin
from mpxla.parallel.updates.trace import UpdateFunction, python_state, without_tensors
from mpxla.stage.program import trace_program
from mpxla.stage.spec import TensorSpec

__all__ = ["UPDATE", "recall_update"]

UPDATE = "optimizer update"
_Settings = tuple[bool, torch.dtype, frozenset[str], Mapping[int, Origin] | None]


def recall_update(
    arrangement: Arrangement,
    optimizer: Any,
    inputs: Sequence[TensorSpec],
    backend: Backend,
    kept: Kept,
    settings: _Settings,
) -> fx.GraphModule:
    """An optimizer's update as one graph, as an earlier start has made it or made now.

    Only updates of torch's own optimizers are kept. The settings are the last arguments of
    `UpdateFunction`.

    Raises:
        LoweringError: the update cannot be traced.
        NotTraceableError: it does more than change tensors.
    """
    return kept.recall(
        _key(arrangement, optimizer, inputs, backend, settings) if kept else None,
        lambda: _update_graph(arrangement, optimizer, inputs, backend.lowering, settings),
        lambda made: dumped(made, TensorSpec.of),
        lambda found: loaded(found, TensorSpec.without_storage),
    )


def _key(
    arrangement: Arrangement,
    optimizer: Any,
    inputs: Sequence[TensorSpec],
    backend: Backend,
    settings: _Settings,
) -> str | None:
    """What an update is kept by; None if code that is not torch's decides on it."""
    *plain, origins = settings
    kind = type(optimizer)
    code = inspect.unwrap(kind.step).__module__
    if kind not in ELEMENTWISE or origins is not None or not code.startswith("torch."):
        return None
    groups = [{k: v for k, v in g.items() if k not in NOT_CONSTANT} for g in optimizer.param_groups]
    trained = (p for group in arrangement.trained for p in group)
    in_python = [without_tensors(optimizer.state.get(p, {})) for p in trained]
    facts = (
        *(kind, own_attributes(optimizer), groups, in_python, list(inputs), plain),
        replace(arrangement, trained=()),
    )
    try:
        return key_of("update", backend.name, torch_settings(), described(facts))
    except UnknownValueError:
        return None


def _update_graph(
    arrangement: Arrangement,
    optimizer: Any,
    inputs: Sequence[TensorSpec],
    lowering: Lowering,
    settings: _Settings,
) -> fx.GraphModule:
    """The same, made now."""
    *_, origins = settings
    # Noise is drawn by where an element is in the model, so there no two parameters are equal.
    if type(optimizer) not in ELEMENTWISE or origins is not None:
        function = UpdateFunction(arrangement, optimizer, *settings)
        return trace_program(UPDATE, function, inputs, lowering)
    graph = fx.Graph()
    arguments = [graph.placeholder(f"argument_{i}") for i in range(len(inputs))]
    rates = range(arrangement.num_slots, len(inputs))
    traced: dict[Any, dict[tuple[int, ...], fx.GraphModule]] = defaultdict(dict)
    constants: dict[str, Any] = {}
    results: dict[int, fx.Node] = {}
    shared: dict[Any, fx.Node] = {}
    for number, places in enumerate(arrangement.places):
        for index in range(len(places)):
            alone, slots = arrangement.alone(number, index)
            taken = [*slots, *rates]
            specs = tuple(inputs[i] for i in taken)
            (own,) = alone.places[number]
            state = optimizer.state.get(alone.trained[number][0], {})
            shape = specs[own.parameter].shape
            kinds = [(s.dtype, s.shape if s.shape != shape else None) for s in specs]
            kind = number, own[:2], tuple(own.state.items()), own.source, python_state(state)
            parts = traced[*kind, *kinds]
            if shape not in parts:
                parts[shape] = _resized(parts, shape) or trace_program(
                    UPDATE, UpdateFunction(alone, optimizer, *settings), specs, lowering
                )
                constants |= _renamed_constants(parts[shape], f"kind_{len(constants)}")
            values = _copied(parts[shape].graph, graph, [arguments[i] for i in taken], shared)
            for slot, value in zip(alone.changed, values, strict=True):
                results.setdefault(slots[slot], value)  # a count of steps that many share
    graph.output([results[slot] for slot in arrangement.changed])
    graph.lint()
    return _make_graph_module(constants, graph)


def _copied(
    part: fx.Graph, graph: fx.Graph, arguments: Sequence[fx.Node], shared: dict[Any, fx.Node]
) -> list[fx.Node]:
    """Copies a graph into another one, with nodes of that as its arguments; gives its results.

    Numbers that follow from counts and rates are computed once for all parameters, and are in
    `shared` by what they follow from: else they are half of the graph.
    """
    copies: dict[fx.Node, fx.Node] = {}
    remaining = iter(arguments)
    for node in part.nodes:
        if node.op == "placeholder":
            copies[node] = next(remaining)
        elif node.op == "output":
            return [copies[value] for value in outputs_of(part)]
        elif node.op == "call_function" and _shape_of(node) == ():
            key = node.target, str(fx.map_arg((node.args, node.kwargs), copies.__getitem__))
            if key not in shared:
                shared[key] = graph.node_copy(node, copies.__getitem__)
            copies[node] = shared[key]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    raise AssertionError("a graph ends with its output")


def _resized(
    traced: Mapping[tuple[int, ...], fx.GraphModule], shape: tuple[int, ...]
) -> fx.GraphModule | None:
    """An update as it was traced for parameters of two shapes, for a third one.

    None if it has not been traced twice, or not alike: then something in it depends on the shape.
    """
    if len(traced) < 2 or () in (shape, *traced):
        return None
    (first, one), (second, other) = list(traced.items())[:2]
    if one.graph.find_nodes(op="get_attr"):  # of which each has its own
        return None
    try:
        if fingerprint(one.graph, one, ()) != fingerprint(other.graph, other, ()):
            return None
    except UnknownValueError:
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(one.graph, copies))
    alike = (node for node in other.graph.nodes if node.op != "output")
    for node, twin in zip(copies, alike, strict=True):
        shapes = _shape_of(node), _shape_of(twin)
        if shapes == (first, second):
            dtype = node.meta["val"].dtype
            copies[node].meta["val"] = TensorSpec(shape, dtype).without_storage()
        elif shapes[0] != shapes[1]:
            return None
    return _make_graph_module(one, graph)


def _shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """None where it is not known yet."""
    return tuple(node.meta["val"].shape) if "val" in node.meta else None


def _renamed_constants(module: fx.GraphModule, prefix: str) -> dict[str, torch.Tensor]:
    """The constants that a graph reads, under names that no other graph has."""
    found: dict[str, torch.Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        name = f"{prefix}_{node.target}"
        found[name] = getattr(module, str(node.target))
        node.target = name
    return found
