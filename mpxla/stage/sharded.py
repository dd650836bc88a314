"""Parameters and gradients of which each rank has a part, in the programs of a stage.

A stage is lowered as if its parameters were whole. Then its graphs are rewritten: a divided
parameter becomes this rank's part and an all-gather before its use, and its gradient is scattered
over the group, so that accumulators are parts as well (ZeRO-3; in ZeRO-2 the latter alone):

    forward     part of w0 -> gather -> block 0      part of w1 -> gather -> block 1
    backward    part of w1 -> gather -> block 1 -> gradient of w1 -> reduce-scatter -> accumulator

What the backward saves of a parameter is the part, so it gathers once more and nothing keeps a
whole copy. Parameters are gathered block by block, in *turns*; the pieces of a program
(`stage/pieces.py`) hold no more than two turns at a time. Gradients are scattered block by block
too, each while the next block computes. (Rajbhandari et al., "ZeRO", 2020; as a rewriting of
graphs: "SimpleFSDP", arXiv:2411.00284.)

Gradients are scattered in the type of the accumulators, as means over the group. This module must
not know how many groups there are, nor what optimizers do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mpxla.graph.typed import outputs_of
from mpxla.stage.cleanup import is_view
from mpxla.stage.flat import SHARDING_GROUP, FlatShard
from mpxla.stage.lower import LoweredStage
from mpxla.stage.pieces import DEPARTURE, TURN, Turn

__all__ = ["block_of", "divide_stage", "exchanges"]

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def divide_stage(
    lowered: LoweredStage,
    shards: Mapping[str, FlatShard],
    gradient_shards: Mapping[str, FlatShard],
    max_live: int,
) -> LoweredStage:
    """A lowered stage that takes parts of parameters and gives parts of gradients.

    Args:
        lowered: the stage, for whole parameters; its graphs are changed in place.
        shards: of the parameters that are divided, by name.
        gradient_shards: of those whose gradients are; `shards` are among them.
        max_live: most elements that are to be whole at a time; one turn always is.
    """
    names = lowered.spec.parameters
    divided = {i: shards[name] for i, name in enumerate(names) if name in shards}
    scattered = {i: gradient_shards[n] for i, n in enumerate(names) if n in gradient_shards}
    if divided:
        arguments = list(lowered.forward_inputs)
        for i, shard in divided.items():
            arguments[i] = shard.spec(arguments[i].dtype)
        _gather(lowered.forward, divided, dict(enumerate(names)), max_live)
        lowered = replace(lowered, forward_inputs=tuple(arguments))
    if lowered.backward is None or not scattered:
        return lowered
    return _divide_backward(lowered, divided, scattered, max_live)


def exchanges(graph: fx.Graph) -> list[str]:
    """What a program gathers and scatters, in order; a line for each, for comparison."""
    kinds = {TURN: "gathers", DEPARTURE: "scatters the gradient of"}
    found = [(node, key) for node in graph.nodes for key in kinds if key in node.meta]
    return [f"{kinds[key]} {node.meta[key].of}" for node, key in found]


def _divide_backward(
    lowered: LoweredStage,
    divided: Mapping[int, FlatShard],
    scattered: Mapping[int, FlatShard],
    max_live: int,
) -> LoweredStage:
    assert lowered.backward is not None
    spec, derivative = lowered.spec, lowered.backward.derivative
    arguments = list(lowered.backward_inputs)
    trained = [spec.parameters.index(name) for name in spec.trained]
    results = {i: position for position, i in enumerate(trained) if i in scattered}
    for i, position in results.items():
        arguments[position] = scattered[i].spec(arguments[position].dtype)
    argument_of = {
        place: s.argument
        for place, s in enumerate(lowered.saved)
        if s.argument is not None and s.argument in divided
    }
    for place, argument in argument_of.items():
        arguments[len(spec.trained) + place] = lowered.forward_inputs[argument]
    if argument_of:
        shards = {place: divided[argument] for place, argument in argument_of.items()}
        of_saved = {place: spec.parameters[argument] for place, argument in argument_of.items()}
        _gather(derivative, shards, of_saved, max_live)
    dtypes = {i: lowered.backward_inputs[position].dtype for i, position in results.items()}
    names = dict(enumerate(spec.parameters))
    _scatter(derivative, {i: scattered[i] for i in results}, dtypes, names, max_live)
    return replace(lowered, backward_inputs=tuple(arguments))


def block_of(name: str) -> str:
    """What a parameter is gathered together with: `h.0` of `h.0.attn.weight`, else its module."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])


# --- gathering ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Use:
    """A node that reads a parameter, perhaps through views."""

    argument: int
    views: tuple[fx.Node, ...]
    node: fx.Node


def _gather(
    module: fx.GraphModule,
    shards: Mapping[int, FlatShard],
    names: Mapping[int, str],
    max_live: int,
) -> None:
    """Makes arguments parts, with a gather before the uses of each in every turn."""
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    uses = [use for i in shards for use in _uses_of(i, placeholders[i])]
    uses.sort(key=lambda use: use.node)
    turns: dict[int, list[_Use]] = {}
    numbers = _turns([block_of(names[use.argument]) for use in uses])
    for use, number in zip(uses, numbers, strict=True):
        turns.setdefault(number, []).append(use)
    live = [sum(shards[i].num_elements for i in {u.argument for u in t}) for t in turns.values()]
    for i, shard in shards.items():
        whole = placeholders[i].meta["val"]
        part = whole.new_empty(shard.num_own)
        placeholders[i].meta = {**placeholders[i].meta, "val": part}
    for number, turn in turns.items():
        together = live[number] + (live[number - 1] if number else 0)
        wholes: dict[int, fx.Node] = {}
        first = min(use.node for use in turn)
        for use in turn:
            i = use.argument
            if i not in wholes:
                meta = Turn(number, together > max_live, names[i])
                with graph.inserting_before(first):
                    wholes[i] = _gathered(graph, placeholders[i], shards[i], meta)
            _rewire(graph, use, placeholders[i], wholes[i])
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()


def _uses_of(argument: int, placeholder: fx.Node) -> list[_Use]:
    """What reads a parameter and is no view of it: views would stand where nothing is gathered."""
    found: list[_Use] = []
    open_nodes: list[tuple[fx.Node, tuple[fx.Node, ...]]] = [(placeholder, ())]
    while open_nodes:
        node, views = open_nodes.pop()
        for user in node.users:
            if is_view(user):
                open_nodes.append((user, (*views, user)))
            else:
                found.append(_Use(argument, views, user))
    return found


def _turns(blocks: Sequence[str]) -> list[int]:
    """The turn of each entry, by its block; a block that comes again later is a new turn."""
    names: list[str] = []
    turns: list[int] = []
    for block in blocks:
        recent = [n for n in (len(names) - 1, len(names) - 2) if n >= 0 and names[n] == block]
        if not recent:
            names.append(block)
        turns.append(recent[0] if recent else len(names) - 1)
    return turns


def _gathered(graph: fx.Graph, part: fx.Node, shard: FlatShard, turn: Turn) -> fx.Node:
    """The whole parameter of a part; the graph's insertion point is where it goes."""
    length = shard.length * shard.size
    # On all ranks if on any: what has to be computed before a gather decides on the piece that the
    # gather is in, and ranks that have it in different pieces gather different tensors together.
    flat = part if length == shard.num_elements else _padded(graph, part, shard.length)
    gather = _c10d.all_gather_into_tensor.default
    node = _call(graph, gather, flat, shard.size, SHARDING_GROUP)
    node.meta[TURN] = turn
    node = _call(graph, _c10d.wait_tensor.default, node)
    if shard.num_elements < length:
        node = _call(graph, _aten.slice.Tensor, node, 0, 0, shard.num_elements)
    return _call(graph, _aten.view.default, node, list(shard.whole))


def _rewire(graph: fx.Graph, use: _Use, part: fx.Node, whole: fx.Node) -> None:
    """Lets a node read the whole parameter, through views of its own."""
    last = use.views[-1] if use.views else part
    with graph.inserting_before(use.node):
        for view in use.views:
            source = view.all_input_nodes[0]
            copy = graph.node_copy(view, lambda n, known=source, to=whole: to if n is known else n)
            whole = copy
    use.node.replace_input_with(last, whole)


# --- scattering ---------------------------------------------------------------------------------


def _scatter(
    module: fx.GraphModule,
    shards: Mapping[int, FlatShard],
    dtypes: Mapping[int, torch.dtype],
    names: Mapping[int, str],
    max_live: int,
) -> None:
    """Makes gradients the means of their parts over the group, as soon as they are there.

    All is by the index of the argument whose gradient it is, if it has one. At most `max_live`
    elements of gradients are to be whole at a time.
    """
    graph = module.graph
    results = outputs_of(graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    order = sorted((i for i in shards if results[i] is not None), key=results.__getitem__)
    turns = _turns([block_of(names[i]) for i in order])
    live = [0] * (max(turns, default=0) + 2)
    for i, turn in zip(order, turns, strict=True):
        live[turn] += shards[i].num_elements
    for i, turn in zip(order, turns, strict=True):
        gradient = results[i]
        meta = Turn(turn, live[turn] + live[turn + 1] > max_live, names[i])
        # Where it comes in the graph says which computation a turn has to wait for.
        with graph.inserting_before(first if gradient.op == "placeholder" else gradient.next):
            results[i] = _scattered(graph, gradient, shards[i], dtypes[i], meta)
    graph.output_node().args = (tuple(results),)
    graph.lint()
    module.recompile()


def _scattered(
    graph: fx.Graph, gradient: fx.Node, shard: FlatShard, dtype: torch.dtype, turn: Turn
) -> fx.Node:
    node = gradient
    if gradient.meta["val"].dtype != dtype:
        node = _call(graph, _aten._to_copy.default, node, dtype=dtype)
    node = _call(graph, _aten.clone.default, node, memory_format=torch.contiguous_format)
    node = _call(graph, _aten.view.default, node, [shard.num_elements])
    if shard.num_elements < shard.length * shard.size:
        node = _padded(graph, node, shard.length * shard.size)
    scatter = _c10d.reduce_scatter_tensor.default
    node = _call(graph, scatter, node, "sum", shard.size, SHARDING_GROUP)
    node.meta[DEPARTURE] = turn
    node = _call(graph, _c10d.wait_tensor.default, node)
    node = _call(graph, _aten.mul.Tensor, node, 1.0 / shard.size)
    if shard.num_own < shard.length:
        node = _call(graph, _aten.slice.Tensor, node, 0, 0, shard.num_own)
    return node


# --- nodes --------------------------------------------------------------------------------------


def _padded(graph: fx.Graph, flat: fx.Node, length: int) -> fx.Node:
    missing = length - flat.meta["val"].shape[0]
    return _call(graph, _aten.constant_pad_nd.default, flat, [0, missing])


def _call(graph: fx.Graph, target: Any, source: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    """A node that knows its value."""
    node = graph.call_function(target, (source, *args), kwargs)
    with torch.no_grad():
        node.meta["val"] = target(source.meta["val"], *args, **kwargs)
    return node
