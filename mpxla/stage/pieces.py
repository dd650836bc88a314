"""Cutting a graph into pieces that different things run.

A stage's program is a list of pieces, usually of one. A piece of kind compute is one executable of
the device; a piece of kind host holds operators that the device has no code for, and runs them one
by one on the processor; a piece of kind collective talks to other ranks over a transport, where the
device's programs cannot.

    nodes:   a  b  H(b)  c  d(H)  H(d)  e
    pieces:  [a b c] [H(b)] [d] [H(d)] [e]        each takes and gives numbered values

Every piece takes as much as can run when its turn comes, so that there are as few of them as
possible. Values are numbered: the arguments of the graph first, then what one piece leaves for
another or as a result. This module is pure: it knows neither devices nor how pieces run.
"""

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from mpxla.comm.packing import describe
from mpxla.graph.collectives import is_collective
from mpxla.graph.containers import has_tensors
from mpxla.graph.split import copy_nodes
from mpxla.graph.stepgraph import is_random
from mpxla.graph.typed import input_of, outputs_of, schema_of, target_of
from mpxla.stage.cleanup import is_view
from mpxla.stage.spec import TensorSpec

__all__ = [
    "DEPARTURE",
    "TURN",
    "CollectivePiece",
    "ComputePiece",
    "HostPiece",
    "Piece",
    "PieceList",
    "Turn",
    "annotate",
    "split_graph",
]


TURN = "mpxla_turn"
"""Key in the `meta` of collectives that bring something large: their `Turn`."""
DEPARTURE = "mpxla_departure"
"""Key in the `meta` of collectives that take something large away: their `Turn`."""


@dataclass(frozen=True)
class Turn:
    """When a collective may start whose result or operand is large, as a whole parameter is.

    What a turn brings is started once everything that reads the turn before it has been started.
    What a turn takes away leaves when the next turn computes, and before the one after it does.

    Attributes:
        number: of the turn, in the order of the program.
        is_alone: whether those readers must also have ended; else those of the turn before them,
            so that the collectives of one turn overlap with the computation of another. What leaves
            does so before the next turn computes.
        of: name of the parameter, for comparison and messages.
    """

    number: int
    is_alone: bool = False
    of: str = ""


@dataclass(frozen=True)
class Piece:
    """Consecutive work of one kind.

    Attributes:
        module: the nodes, as a graph of their own.
        inputs: numbers of the values that it takes.
        outputs: numbers of the values that it gives.
        input_specs: shapes and dtypes of the former.
        output_specs: shapes and dtypes of the latter.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_specs: tuple[TensorSpec, ...]
    output_specs: tuple[TensorSpec, ...]


class ComputePiece(Piece):
    """Runs as one executable of the device."""


class HostPiece(Piece):
    """Runs operator by operator on the processor."""


class CollectivePiece(Piece):
    """Runs over a transport, together with the other members of its groups."""


@dataclass(frozen=True)
class PieceList:
    """A program in pieces.

    Attributes:
        pieces: in the order in which they run.
        num_arguments: how many values are there at the beginning.
        num_values: how many there are in all.
        results: numbers of the values that the program returns.
    """

    pieces: tuple[Piece, ...]
    num_arguments: int
    num_values: int
    results: tuple[int, ...]

    def last_uses(self) -> list[tuple[int, ...]]:
        """For every piece, the values that nobody needs once it has run."""
        last = {number: i for i, piece in enumerate(self.pieces) for number in piece.inputs}
        last.update({n: i for i, p in enumerate(self.pieces) for n in p.outputs if n not in last})
        kept = set(self.results)
        return [
            tuple(n for n, at in last.items() if at == i and n not in kept)
            for i in range(len(self.pieces))
        ]

    def donated(self, arguments: Collection[int]) -> list[tuple[int, ...]]:
        """For every piece, the positions of inputs that its results may take the memory of.

        Those are donated arguments of the program which nothing reads later, and which a result
        can replace. A host piece may fail, and its caller goes on with what it has given then: what
        is read before one is not donated.
        """
        hosts = [i for i, piece in enumerate(self.pieces) if isinstance(piece, HostPiece)]
        found: list[tuple[int, ...]] = []
        for i, (piece, done) in enumerate(zip(self.pieces, self.last_uses(), strict=True)):
            takes = isinstance(piece, ComputePiece) and i > max(hosts, default=-1)
            free = Counter(piece.output_specs if takes else ())
            positions: list[int] = []
            for position, spec in enumerate(piece.input_specs):
                number = piece.inputs[position]
                if number in arguments and number in done and free[spec]:
                    free[spec] -= 1
                    positions.append(position)
            found.append(tuple(positions))
        return found

    def messages(self, group: str) -> list[str]:
        """What the pieces exchange within a group of ranks, in order, for comparison and messages.

        Those of one piece may travel together, so all members must have the same in each.
        """
        lines: list[str] = []
        pieces = (piece for piece in self.pieces if isinstance(piece, CollectivePiece))
        for number, piece in enumerate(pieces):
            for node in piece.module.graph.nodes:
                if is_collective(node) and node.args[-1] == group:
                    gives = describe([node.meta["val"]])
                    lines.append(f"exchange {number}: {schema_of(node).name} gives {gives}")
        return lines


def annotate(module: fx.GraphModule, inputs: Sequence[TensorSpec]) -> None:
    """Gives every node without a known value (`meta["val"]`) one on the device `meta`.

    Values that are known may be on any device.
    """
    graph, specs = module.graph, iter(inputs)
    with torch.no_grad():
        for node in graph.nodes:
            spec = next(specs) if node.op == "placeholder" else None
            if node.op != "output" and "val" not in node.meta:
                node.meta["val"] = _value_of(node, spec, module)
    for node in graph.nodes:  # the dtype of an argument, say, is a constant
        values = {n: n.meta["val"] for n in node.all_input_nodes}
        constants = {n: value for n, value in values.items() if not has_tensors(value)}
        if constants:
            node.args, node.kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda n, known=constants: known.get(n, n)
            )
    graph.eliminate_dead_code()


def _value_of(node: fx.Node, spec: TensorSpec | None, root: torch.nn.Module) -> Any:
    """What a node gives, of tensors without storage; its inputs are known."""
    if spec is not None:
        return spec.without_storage()
    target = target_of(node)
    if node.op == "get_attr":
        return functools.reduce(getattr, target.split("."), root)
    args, kwargs = fx.map_arg(
        (node.args, node.kwargs),
        lambda n: pytree.tree_map_only(
            torch.Tensor, lambda value: TensorSpec.of(value).without_storage(), n.meta["val"]
        ),
    )
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def split_graph(module: fx.GraphModule, kind_of: Callable[[fx.Node], type[Piece]]) -> PieceList:
    """Cuts a functional graph, whose nodes all know their values, into pieces."""
    graph = module.graph
    groups = _group(graph, kind_of)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    results: list[fx.Node] = outputs_of(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    drafts = [_draft(kind, nodes, order) for kind, nodes in groups]
    number = {node: i for i, node in enumerate(placeholders)}
    # Results come first, in their order: donated memory goes to those at the same place.
    needed = dict.fromkeys([*results, *(node for draft in drafts for node in draft.taken)])
    for draft in drafts:
        own = set(draft.nodes)
        draft.given = [node for node in needed if node in own and node not in number]
        number.update({node: len(number) + i for i, node in enumerate(draft.given)})
    _await_earlier_turns(drafts)
    return PieceList(
        tuple(_finish(draft, number, module) for draft in drafts if draft.given),
        len(placeholders),
        len(number),
        tuple(number[node] for node in results),
    )


@dataclass
class _Draft:
    """A piece in the making: its nodes, and those of others that it reads and that read it."""

    kind: type[Piece]
    nodes: list[fx.Node]
    taken: list[fx.Node]
    given: list[fx.Node] = field(default_factory=list)


def _group(
    graph: fx.Graph, kind_of: Callable[[fx.Node], type[Piece]]
) -> list[tuple[type[Piece], list[fx.Node]]]:
    """The nodes in groups of one kind, of which each depends on earlier ones only."""
    there = ("placeholder", "get_attr", "output")
    remaining = [n for n in graph.nodes if n.op not in there]
    kinds: dict[fx.Node, type[Piece]] = {}
    for node in remaining:  # a tuple cannot leave its piece, its elements can
        is_element = node.target is operator.getitem
        kinds[node] = kinds[input_of(node)] if is_element else kind_of(node)
    # Computing comes first.
    order = sorted(set(kinds.values()), key=lambda k: (k is not ComputePiece, k.__name__))
    placed = {node for node in graph.nodes if node.op in there}
    groups: list[tuple[type[Piece], list[fx.Node]]] = []
    turns, departures = _Turns(remaining), _Departures(remaining)
    while remaining:
        turns.advance(placed)
        departures.advance(placed)
        allowed = [n for n in remaining if turns.allows(n) and departures.allows(n)]
        for kind in order:
            # Those that need nothing but what is placed, and each other. The kind that has just run
            # has none left: kinds alternate.
            ready: dict[fx.Node, None] = {}
            for node in (n for n in allowed if kinds[n] is kind):
                if all(s in placed or s in ready for s in node.all_input_nodes):
                    ready[node] = None
            if ready:
                groups.append((kind, list(ready)))
                placed.update(ready)
                remaining = [node for node in remaining if node not in ready]
                break
        else:
            turns.skip()  # something reads what two turns bring
    return groups


class _Turns:
    """Which turn may start, while nodes are being placed."""

    def __init__(self, nodes: Sequence[fx.Node]):
        self._turn = {node: node.meta[TURN].number for node in nodes if TURN in node.meta}
        self._readers: dict[int, set[fx.Node]] = {}
        for node, number in self._turn.items():
            self._readers.setdefault(number, set()).update(_readers_of(node))
        self._current = 0

    def allows(self, node: fx.Node) -> bool:
        """Whether a node does not have to wait for its turn."""
        return self._turn.get(node, 0) <= self._current

    def advance(self, placed: set[fx.Node]) -> None:
        """Goes on to the next turn once all that reads the current one is placed."""
        while self._readers.get(self._current, set()) <= placed and self._is_left():
            self._current += 1

    def skip(self) -> None:
        """Goes on to the next turn in any case."""
        assert self._is_left(), "every node depends on earlier ones only"
        self._current += 1

    def _is_left(self) -> bool:
        return self._current < max(self._readers, default=0)


class _Departures:
    """What has to wait until something large has left, while nodes are being placed.

    Nodes are of the segment of the first turn that has not left before them, in the order of the
    graph; those before the first that serves that turn alone are of the one before as well. What
    follows from the collectives themselves waits for nothing else.
    """

    def __init__(self, nodes: Sequence[fx.Node]):
        self._turn = {n: n.meta[DEPARTURE] for n in nodes if DEPARTURE in n.meta}
        missing = Counter(turn.number for turn in self._turn.values())
        last = max(missing, default=-1) + 1
        serves = self._served(nodes)
        self._segments: dict[fx.Node, tuple[int, int]] = {}  # the first and the last one of each
        after: set[fx.Node] = set()
        begun = 0
        for node in nodes:
            turn = self._turn.get(node)
            begun = max(begun, serves.get(node, 0))
            if turn is not None:
                missing[turn.number] -= 1
            if turn is not None or not after.isdisjoint(node.all_input_nodes):
                after.add(node)
            elif node.target is operator.getitem:
                if node.args[0] in self._segments:  # a tuple cannot leave its piece
                    self._segments[node] = self._segments[node.args[0]]
            elif not is_collective(node):
                ends = next((n for n in range(last) if missing[n]), last)
                self._segments[node] = min(begun, ends), ends
        self._ends: list[float] = [0.0, 0.0]

    def _served(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """The turn of nodes that nothing needs but what is to leave."""
        found = {node: turn.number for node, turn in self._turn.items()}
        for node in reversed(nodes):
            if node not in found and node.users and all(user in found for user in node.users):
                found[node] = min(found[user] for user in node.users)
        return found

    def advance(self, placed: set[fx.Node]) -> None:
        """Takes note of what has been placed."""
        left = (t.number + (not t.is_alone) for n, t in self._turn.items() if n not in placed)
        begun = (ends for node, (_, ends) in self._segments.items() if node not in placed)
        self._ends = [min(left, default=math.inf), min(begun, default=math.inf)]

    def allows(self, node: fx.Node) -> bool:
        """Whether a node does not have to wait."""
        last_segment, first_missing = self._ends
        turn = self._turn.get(node)
        if turn is not None:
            return first_missing > turn.number + (not turn.is_alone)
        return self._segments.get(node, (0, 0))[0] <= last_segment


def _readers_of(node: fx.Node) -> set[fx.Node]:
    """What computes with the result of a collective, perhaps through views of it."""
    found: set[fx.Node] = set()
    todo = list(node.users)
    while todo:
        user = todo.pop()
        if user.op == "output":
            continue
        if is_view(user) or is_collective(user):
            todo += user.users
        else:
            found.add(user)
    return found


def _await_earlier_turns(drafts: Sequence["_Draft"]) -> None:
    """Lets collectives of a turn take a result of earlier computation, and so wait for its end.

    Programs are started long before they end, and would be followed by the gathers of all turns.
    """
    computed: list[_Draft] = []
    for draft in drafts:
        if draft.kind is ComputePiece and draft.given:
            computed.append(draft)
        turns = [node.meta[TURN] for node in draft.nodes if TURN in node.meta]
        back = 1 if any(turn.is_alone for turn in turns) else 2
        if turns and len(computed) >= back:
            smallest = min(computed[-back].given, key=lambda n: n.meta["val"].numel())
            draft.taken = list(dict.fromkeys((*draft.taken, smallest)))


def _draft(kind: type[Piece], nodes: list[fx.Node], order: dict[fx.Node, int]) -> _Draft:
    """Adds what costs nothing to compute again; the rest of what the nodes read is taken."""
    held = dict.fromkeys(nodes)
    taken: dict[fx.Node, None] = {}
    todo = [source for node in nodes for source in node.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in held or node in taken:
            continue
        if node.op == "get_attr" or (kind is ComputePiece and _is_free(node)):
            held[node] = None
            todo += node.all_input_nodes
        else:
            taken[node] = None
    return _Draft(kind, sorted(held, key=order.__getitem__), sorted(taken, key=order.__getitem__))


def _is_free(node: fx.Node) -> bool:
    """Whether a node is a constant, or rearranges an argument; as a value it would be a copy."""
    if node.op != "call_function" or is_random(node):
        return False
    if not node.all_input_nodes:
        return True
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _finish(draft: _Draft, number: dict[fx.Node, int], root: torch.nn.Module) -> Piece:
    graph = copy_nodes(draft.taken, draft.nodes, draft.given)
    graph.eliminate_dead_code()
    return draft.kind(
        fx.GraphModule(root, graph),
        tuple(number[node] for node in draft.taken),
        tuple(number[node] for node in draft.given),
        tuple(TensorSpec.of(node.meta["val"]) for node in draft.taken),
        tuple(TensorSpec.of(node.meta["val"]) for node in draft.given),
    )
