"""Sequence parallelism: what is equal on all ranks between products is computed in parts.

Between the products of a block every rank of a tensor-parallel group has the same residual stream,
and computes the same norms, dropouts and sums. `divide_sequences` lets each compute and keep its
part of the positions (arXiv:2205.05198, section 4.2.2):

    before   products -> sum over ranks ------> dropout, residual, norm ------> vary -> products
    after    products -> sum, own positions --> the same of own positions ----> gather -> products

A sum over ranks falls into its halves, so as many bytes travel, and activations of the stream take
1 / ranks of the memory. Parameters of norms see a part of the positions: their gradients are summed
over the ranks, as those of equal values are that meet varying ones.

This module must not know how a backend communicates.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from mpxla.graph.collectives import (
    GATHER,
    JOIN_POSITIONS,
    OWN_POSITIONS,
    SUM,
    SUM_OF_POSITIONS,
    TENSOR_GROUP,
    VARY,
    resized,
)
from mpxla.graph.stepgraph import CASTS, VIEWS, StepGraph
from mpxla.graph.tensor.varying import VARYING
from mpxla.graph.typed import arguments_of, input_of, named_arguments, target_of

__all__ = ["divide_sequences"]

_aten = torch.ops.aten
_POSITIONS = 1
"""Dim of the positions in streams [samples, positions, width]."""
_ALONG_WIDTH = (_aten.layer_norm.default, _aten.dropout.default)
_PLAIN = (*CASTS, _aten.detach.default)


def divide_sequences(step: StepGraph, index: int, size: int) -> StepGraph:
    """Divides the streams of a step between its products, in place, after `mark_varying`."""
    _move_crossings(step.graph)
    _move_sums(step.graph)
    nodes = list(step.graph.nodes)
    sources = [n for n in nodes if n.target is SUM and _is_stream(n, size)]
    divided = _divided(nodes, sources)
    if sources:
        _Rewriting(step.graph, divided, index, size).run(sources)
        step.graph.eliminate_dead_code()
        step.graph.lint()
    return step


def _is_stream(node: fx.Node, size: int) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return value.dim() == 3 and value.shape[_POSITIONS] % size == 0


def _move_crossings(graph: fx.Graph) -> None:
    """Views of [samples, positions, width] as rows come after crossings, not before them."""
    for node in list(graph.nodes):
        while node.target is VARY and input_of(node).target in VIEWS:
            view = input_of(node)
            source = input_of(view)
            with graph.inserting_before(node):
                crossing = graph.call_function(VARY, (source, *node.args[1:]))
                crossing.meta = {**node.meta, "val": source.meta["val"]}
                moved = graph.call_function(target_of(view), (crossing, *view.args[1:]))
                moved.meta = _varying(view, node)
            node.replace_all_uses_with(moved)
            graph.erase_node(node)
            node = crossing
    graph.eliminate_dead_code()


def _varying(view: fx.Node, source: fx.Node) -> dict[str, Any]:
    """What is known of a view, as one of a varying value."""
    mark = {VARYING: source.meta[VARYING]} if VARYING in source.meta else {}
    return {**view.meta, **mark}


def _move_sums(graph: fx.Graph) -> None:
    """Views of rows as [samples, positions, width] come before sums over ranks, not after them."""
    for node in list(graph.nodes):
        if node.target is not SUM or len(node.users) != 1:
            continue
        (view,) = node.users
        if view.target not in VIEWS or view.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
            continue
        part = input_of(node)
        with graph.inserting_before(view):
            moved = graph.call_function(target_of(view), (part, *view.args[1:]))
            moved.meta = _varying(view, part)
            total = graph.call_function(SUM, (moved, *node.args[1:]))
            total.meta = dict(view.meta)
        view.replace_all_uses_with(total)
        graph.erase_node(view)
        graph.erase_node(node)


def _divided(nodes: Collection[fx.Node], sources: Collection[fx.Node]) -> set[fx.Node]:
    """The sources, and all that is computed of them position by position."""
    found = set(sources)
    for node in nodes:
        if node not in found and VARYING not in node.meta and _follows(node, found):
            found.add(node)
    return found


def _follows(node: fx.Node, found: Collection[fx.Node]) -> bool:
    streams = [n for n in node.all_input_nodes if n in found]
    if not streams or node.op != "call_function" or not _is_by_position(node):
        return False
    value, first = node.meta.get("val"), streams[0].meta["val"]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    if value.dim() != 3 or value.shape[:2] != first.shape[:2]:
        return False
    return all(n in found or _fits(n, value) for n in node.all_input_nodes)


def _fits(node: fx.Node, result: torch.Tensor) -> bool:
    """Whether an operand beside a stream can be divided with it, or has no positions."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or VARYING in node.meta:
        return False
    return value.dim() < 2 or value.shape[-2] in (1, result.shape[_POSITIONS])


def _is_by_position(node: fx.Node) -> bool:
    """Whether an operator computes each position by itself."""
    target, arguments = target_of(node), arguments_of(node)
    if target in _PLAIN:
        return True
    if target is _aten.layer_norm.default or target is _aten.rms_norm.default:
        return len(arguments[1]) == 1
    if target in _ALONG_WIDTH:
        return True
    if target is _aten.mean.dim:
        return list(arguments[1]) in ([-1], [2]) and len(arguments) > 2 and bool(arguments[2])
    if target is _aten.slice.Tensor:  # of everything, as models cut the last positions for heads
        return node.meta["val"].shape == input_of(node).meta["val"].shape and _is_open(node)
    return torch.Tag.pointwise in getattr(target, "tags", ())


def _is_open(node: fx.Node) -> bool:
    _, dim, start, end, _ = named_arguments(node).values()
    return dim != _POSITIONS or (not start and (end is None or end > 2**62))


class _Rewriting:
    """Exchanges operators of one graph."""

    def __init__(self, graph: fx.Graph, divided: Collection[fx.Node], index: int, size: int):
        self._graph, self._divided = graph, divided
        self._index, self._size = index, size
        self._operands: dict[fx.Node, fx.Node] = {}
        self._wholes: dict[fx.Node, fx.Node] = {}

    def run(self, sources: Collection[fx.Node]) -> None:
        for node in list(self._graph.nodes):
            if node in self._divided:
                self._divide(node, node in sources)
            elif node.target is VARY and node.args[0] in self._divided:
                node.target = JOIN_POSITIONS
                node.args = (node.args[0], *self._place())
            else:
                for source in node.all_input_nodes:
                    if source in self._divided:
                        node.replace_input_with(source, self._whole(source))

    def _place(self) -> tuple[Any, ...]:
        return _POSITIONS, self._size, self._index, TENSOR_GROUP

    def _divide(self, node: fx.Node, is_source: bool) -> None:
        """Computes the own positions of a value."""
        whole = node.meta["val"]
        if is_source:
            node.target, node.args = SUM_OF_POSITIONS, (node.args[0], *self._place())
        else:
            for operand in node.all_input_nodes:
                if operand not in self._divided:
                    node.replace_input_with(operand, self._operand(operand, whole, node))
        node.meta["val"] = _like(whole, _POSITIONS, whole.shape[_POSITIONS] // self._size)
        node.meta[VARYING] = self._index, self._size

    def _operand(self, node: fx.Node, whole: torch.Tensor, user: fx.Node) -> fx.Node:
        """An equal operand: its own positions if it has some, else as one that meets parts."""
        value = node.meta["val"]
        has_positions = value.dim() >= 2 and value.shape[-2] == whole.shape[_POSITIONS] > 1
        if not (has_positions or value.requires_grad):
            return node
        if node not in self._operands:
            with self._graph.inserting_before(user):
                if has_positions:
                    dim = value.dim() - 2
                    arguments = node, dim, self._size, self._index, TENSOR_GROUP
                    made = self._graph.call_function(OWN_POSITIONS, arguments)
                    value = _like(value, dim, value.shape[dim] // self._size)
                else:
                    made = self._graph.call_function(VARY, (node, TENSOR_GROUP))
            made.meta = {**user.meta, "val": value, VARYING: (self._index, self._size)}
            self._operands[node] = made
        return self._operands[node]

    def _whole(self, node: fx.Node) -> fx.Node:
        """All positions, equal on all ranks, for those who compute with them together."""
        if node not in self._wholes:
            value = node.meta["val"]
            with self._graph.inserting_after(node):
                made = self._graph.call_function(GATHER, (node, *self._place()))
            made.meta = {k: v for k, v in node.meta.items() if k != VARYING}
            length = value.shape[_POSITIONS] * self._size
            made.meta["val"] = _like(value, _POSITIONS, length)
            self._wholes[node] = made
        return self._wholes[node]


def _like(value: Any, dim: int, length: int) -> torch.Tensor:
    """What stands for a value with another number of elements along a dim."""
    with value.fake_mode:
        return resized(value, dim, length).requires_grad_(value.requires_grad)
