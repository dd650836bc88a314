"""What a step's graph allows a partitioner to do: which nodes are cut, and which ones follow.

Both partitioners decide about the *spine* only: the nodes that depend on a trainable parameter, on
a random draw or on a buffer that the step updates. Everything else follows from where the spine's
nodes are (`spread`):

    role       node                                          where
    SPINE      see above                                     decided by a partitioner
    INPUT      step input                                    stage 0
    CONSTANT   depends on constants and fixed buffers        a copy wherever it is read
    LOCAL      depends on inputs, cheaper to redo than send  a copy wherever it is read
    HOME       depends on inputs, otherwise                  its earliest reader's stage
    EARLY      depends on inputs, far smaller than they are  stage 0

This module must not know costs of stages, nor how the spine is cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mpxla.graph.partition.modules import parents
from mpxla.graph.partition.twins import wanted_places
from mpxla.graph.partition.words import GraphNode, NodeKind

__all__ = ["Flow", "Group", "Role", "analyse", "last_reader", "spread"]

EARLY_REDUCTION = 2
"""How many times smaller than the inputs it needs a value must be to be computed on stage 0."""

_NUMBER_BYTES = 8
"""Of the largest single number, a float64."""


class Role(Enum):
    """How a node finds its stage; the module's table explains the values."""

    SPINE = "spine"
    INPUT = "input"
    CONSTANT = "constant"
    LOCAL = "local"
    HOME = "home"
    EARLY = "early"


@dataclass(frozen=True)
class Group:
    """Spine nodes that must share one stage."""

    members: tuple[int, ...]
    """At least two nodes, ascending."""
    reason: str
    """A clause for error texts, such as ``they use 'bn.mean', which the step updates``."""


@dataclass(frozen=True)
class Flow:
    """The part of a graph's structure that partitioning depends on."""

    nodes: tuple[GraphNode, ...]
    roles: tuple[Role, ...]
    consumers: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    """The spine in the order in which it is cut: program order, except that movable nodes stand
    right before their first reader."""
    movable: frozenset[int]
    """Spine nodes that depend on no input and may therefore run late: work on parameters alone
    sits with its consumer, and a new value of a parameter with what else uses that."""
    groups: tuple[Group, ...]
    following: Mapping[int, int] = field(default_factory=dict)
    """Nodes of copies of trained modules -> the original's node that they stand next to."""
    beside: Mapping[int, int] = field(default_factory=dict)
    """Work on one parameter of which a number comes, such as a penalty -> the node that uses the
    parameter first, next to which it is computed where it can be."""

    def module_path(self, index: int) -> str:
        """Of a node; of one of a copy, that of its original."""
        return self.nodes[self.following.get(index, index)].module_path


def analyse(
    nodes: Sequence[GraphNode], link: float, twins: Mapping[str, str] | None = None
) -> Flow:
    """Find each node's role, the spine's order and what must stay together.

    Repeated work is weighed against transfers, which take `link` seconds per byte. `twins` are
    parameters of copies, with those of their originals.
    """
    updated = {name for node in nodes for name in node.mutates}
    from_input, in_spine = _dependences(nodes, updated)
    consumers: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for source in dict.fromkeys(node.inputs):
            consumers[source].append(index)
    updates = _of_updates(nodes, updated, in_spine)
    stuck = _of_stuck_values(nodes, consumers, in_spine)
    fixed = {member for group in stuck for member in group.members}
    movable = frozenset(
        index
        for index in range(len(nodes))
        if in_spine[index] and not from_input[index] and index not in fixed
    )
    standing = {index for index in range(len(nodes)) if in_spine[index] and index not in movable}
    places, following = wanted_places(nodes, standing, twins) if twins else ({}, {})
    beside = _of_numbers(nodes, consumers, movable)
    return Flow(
        tuple(nodes),
        _roles(nodes, from_input, in_spine, link),
        tuple(map(tuple, consumers)),
        _cutting_order(nodes, consumers, in_spine, movable, updates, places | beside),
        movable,
        (*updates, *stuck, *_of_twins(nodes, following)),
        following,
        beside,
    )


def spread(flow: Flow, position: Mapping[int, int]) -> list[frozenset[int]]:
    """Place every node, given where the spine's nodes are; a node with several places is copied.

    Positions are any integers from 0 that grow along the pipeline: stages, or pieces of the graph
    that are still to be grouped to stages.
    """
    at: dict[int, frozenset[int]] = {}
    copies: list[frozenset[int]] = [frozenset()] * len(flow.nodes)
    for index in reversed(range(len(flow.nodes))):
        role = flow.roles[index]
        if role is Role.SPINE:
            place = position[index]
        elif role in (Role.INPUT, Role.EARLY) or not flow.consumers[index]:
            place = 0
        else:
            needed = _union([copies[consumer] for consumer in flow.consumers[index]])
            if role is not Role.HOME:
                copies[index] = needed
                continue
            place = min(needed)
        copies[index] = at.setdefault(place, frozenset((place,)))
    return copies


def last_reader(flow: Flow, copies: Sequence[frozenset[int]], index: int) -> int:
    """The last position to which a node's value has to travel, given the result of `spread`.

    It is its own position if nobody else reads it, or if every reader has a copy.
    """
    own = copies[index]
    home = min(own)
    if flow.roles[index] in (Role.CONSTANT, Role.LOCAL):
        return home
    return max([home, *(max(copies[consumer]) for consumer in flow.consumers[index])])


def _union(sets: list[frozenset[int]]) -> frozenset[int]:
    """Union that keeps the object if all sets are the same one, as along a chain."""
    first = sets[0]
    return first if all(other is first for other in sets) else first.union(*sets[1:])


def _dependences(nodes: Sequence[GraphNode], updated: set[str]) -> tuple[list[bool], list[bool]]:
    """Whether each node depends on an input, and whether it belongs to the spine."""
    from_input: list[bool] = []
    in_spine: list[bool] = []
    for node in nodes:
        touches = bool(node.mutates) or not updated.isdisjoint(node.buffers)
        draws = node.kind is NodeKind.RANDOM
        from_input.append(
            node.kind is NodeKind.INPUT or any(from_input[source] for source in node.inputs)
        )
        in_spine.append(
            touches
            or draws
            or bool(node.parameters)
            or any(in_spine[source] for source in node.inputs)
        )
    return from_input, in_spine


def _of_updates(
    nodes: Sequence[GraphNode], updated: set[str], in_spine: Sequence[bool]
) -> tuple[Group, ...]:
    """Users of what the step updates, and of what else is in a module without children there.

    A later step may read all of such a module at once (batch norm in an evaluation). What does not
    belong to the spine can be computed on any stage.
    """
    users: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in {*node.buffers, *node.parameters, *node.mutates}:
            users.setdefault(name, []).append(index)
    inside: dict[str, list[str]] = {}
    for name in users:
        inside.setdefault(_module_of(name), []).append(name)
    around = {"", *(parent for module in inside for parent in parents(module))}
    groups: list[Group] = []
    for name in sorted(updated):
        module = _module_of(name)
        beside = [] if module in around else inside[module]
        in_module = (index for other in beside for index in users[other] if in_spine[index])
        members = tuple(sorted({*users[name], *in_module}))
        if len(members) > 1:
            groups.append(Group(members, f"they use {name!r}, which the step updates"))
    return tuple(groups)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _of_stuck_values(
    nodes: Sequence[GraphNode], consumers: Sequence[Sequence[int]], in_spine: Sequence[bool]
) -> tuple[Group, ...]:
    """Values that cannot travel, with their readers."""
    return tuple(
        Group((i, *readers), f"the value of {node.name!r} cannot travel between stages")
        for i, (node, readers) in enumerate(zip(nodes, consumers, strict=True))
        if in_spine[i] and node.cost.output_bytes == 0 and readers
    )


def _of_twins(nodes: Sequence[GraphNode], following: Mapping[int, int]) -> list[Group]:
    """Readers of a copy's parameters and of the original's: scripts average one into the other."""
    return [
        Group(
            (min(index, other), max(index, other)),
            f"{nodes[index].described()} is the same layer of a copy of the model",
        )
        for index, other in following.items()
    ]


def _of_numbers(
    nodes: Sequence[GraphNode], consumers: Sequence[Sequence[int]], movable: frozenset[int]
) -> dict[int, int]:
    """Work on one parameter of which a number comes, with the node that uses the parameter first.

    Else the stage that reads the numbers would hold all parameters, too. And what a script has
    computed from a parameter between two steps has values only where the parameter is.
    """
    names: dict[int, frozenset[str]] = {}
    users: dict[str, int] = {}
    for index, node in enumerate(nodes):
        made = (names[source] for source in node.inputs if source in movable)
        names[index] = frozenset(node.parameters).union(*made)
        if index not in movable:
            for name in names[index]:
                users.setdefault(name, index)
    beside: dict[int, int] = {}
    for index in sorted(movable, reverse=True):
        node = nodes[index]
        is_number = 0 < node.cost.output_bytes <= _NUMBER_BYTES and not node.mutates
        if is_number and consumers[index] and len(names[index]) == 1:
            (name,) = names[index]
            if name in users:
                beside[index] = users[name]
        if index in beside:
            own = (source for source in node.inputs if source in movable)
            beside.update((source, beside[index]) for source in own)
    return beside


def _cutting_order(
    nodes: Sequence[GraphNode],
    consumers: Sequence[Sequence[int]],
    in_spine: Sequence[bool],
    movable: frozenset[int],
    updates: Sequence[Group],
    places: Mapping[int, int],
) -> tuple[int, ...]:
    """The spine's nodes, sorted by the node before which they are wanted."""
    wanted: list[int | None] = [places.get(index, index) for index in range(len(nodes))]
    for index in reversed(range(len(nodes))):
        if index in movable and (consumers[index] or nodes[index].mutates):
            # A new value that nothing reads is wanted by the others of its group.
            before = [p for consumer in consumers[index] if (p := wanted[consumer]) is not None]
            before += [places[index]] if index in places else []
            wanted[index] = min(before, default=None)
    others = {index: group.members for group in updates for index in group.members}
    for index, node in enumerate(nodes):
        if wanted[index] is None:
            near = (wanted[other] for other in (*node.inputs, *others.get(index, ())))
            wanted[index] = max((place for place in near if place is not None), default=index)
    spine = [index for index in range(len(nodes)) if in_spine[index]]
    return tuple(sorted(spine, key=lambda index: (wanted[index], index)))


def _roles(
    nodes: Sequence[GraphNode],
    from_input: Sequence[bool],
    in_spine: Sequence[bool],
    link: float,
) -> tuple[Role, ...]:
    """Roles of all nodes; weighs redoing a node against sending its value."""
    roles: list[Role] = []
    fetched: list[frozenset[int]] = []  # what a stage must receive to have the node's value
    redo_s: list[float] = []  # seconds it then spends, counting shared work more than once
    for index, node in enumerate(nodes):
        own = frozenset((index,))
        sources = [fetched[source] for source in set(node.inputs)]
        needed = _union(sources) if sources else frozenset()
        seconds = node.cost.compute_s + sum(redo_s[source] for source in set(node.inputs))
        if in_spine[index]:
            role = Role.SPINE
        elif node.kind is NodeKind.INPUT:
            role = Role.INPUT
        elif not from_input[index]:
            role = Role.CONSTANT
        else:
            fetched_bytes = sum(nodes[source].cost.output_bytes for source in needed)
            role = _role_of_input_work(node.cost.output_bytes, fetched_bytes, seconds, link)
        is_copied = role in (Role.CONSTANT, Role.LOCAL)
        roles.append(role)
        fetched.append(needed if is_copied else own)
        redo_s.append(seconds if is_copied else 0.0)
    return tuple(roles)


def _role_of_input_work(output_bytes: int, fetched_bytes: int, seconds: float, link: float) -> Role:
    if output_bytes == 0:
        return Role.LOCAL
    if output_bytes * EARLY_REDUCTION <= fetched_bytes:
        return Role.EARLY
    is_cheap = seconds <= link * (output_bytes - fetched_bytes)
    return Role.LOCAL if is_cheap else Role.HOME
