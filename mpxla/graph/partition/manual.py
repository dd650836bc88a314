"""Manual partition: stages that follow from the ranks of some nodes.

Nodes inside a tagged module are pinned to its rank, and so are nodes that read a parameter outside
of all tags (to the default rank); the rest of the spine (`flow.py`) floats with its
inputs. Data may flow back to an earlier rank, which then owns several stages. Phases:

1. *levels*: level L belongs to rank L mod P; each node gets the first level of its rank that is not
   before its inputs. Nodes that must share a stage are raised together until nothing moves.
2. *sink*: work on parameters alone moves to the last possible level, next to its reader.
3. *merge*: a level is emptied into the next one of its rank if all its readers are late enough.
4. *stages*: levels in use, in order, are the stages.

    levels   0   1   2   3   4         P = 2, data flows 0 -> 1 -> 0
    rank     0   1   0   1   0
    in use   x   x   x                 stages 0, 1, 2 with placement (0, 1, 0)

The same machinery serves a graph whose parameters have been placed by an earlier signature. This
module must not know costs (except what the report says), tensors or modules.
"""

from collections.abc import Iterable, Mapping, Sequence

from mpxla.errors import PartitionError
from mpxla.graph.partition.build import build_partition
from mpxla.graph.partition.flow import Flow, Role, analyse
from mpxla.graph.partition.words import GraphNode, NodeKind, Partition, check_graph

__all__ = ["fixed_ranks", "partition_manual", "place_by_rank"]

_LINK = 1e-9
"""Seconds per byte of a transfer; decides what input-only work is redone instead of sent."""

Ranks = Mapping[int, frozenset[int]]
"""Ranks on which a node may run; nodes that are not in it float."""


def partition_manual(
    nodes: Sequence[GraphNode],
    parameter_bytes: Mapping[str, int],
    num_ranks: int,
    pins: Mapping[int, int],
    default_rank: int,
    fixed: Mapping[str, tuple[int, ...]] | None = None,
) -> Partition:
    """Form the stages that the user's placement of modules asks for.

    Args:
        nodes: The graph, in program order.
        parameter_bytes: Bytes of weights, gradient and optimizer state of every trainable
            parameter, whether or not this graph reads it.
        num_ranks: Number of pp_ranks; some may stay without a stage.
        pins: Node index -> pp_rank of its innermost tagged module. Ignored for step inputs (they
            are on rank 0) and for work on inputs or constants alone (it follows its readers).
        default_rank: pp_rank of nodes that read a parameter outside of all tagged modules.
        fixed: pp_ranks of parameters that have been placed before and must stay; goes
            before `pins`.

    Returns:
        The partition. Stage 0 is on rank 0 whenever the step has inputs, even if it does nothing
        but hand them on.

    Raises:
        PartitionError: A rank out of range, or nodes that must share a stage but cannot.
    """
    check_graph(nodes, parameter_bytes)
    _check_ranks(nodes, num_ranks, pins, default_rank)
    fixed = fixed or {}
    flow = analyse(nodes, _LINK)
    pins = {i: pins[user] for i, user in flow.beside.items() if user in pins} | dict(pins)
    grouped = {member for group in flow.groups for member in group.members}
    pinned: dict[int, frozenset[int]] = {}
    for index in flow.order:
        node = nodes[index]
        # One with an input on the spine floats with it; a batch counter has none.
        follows = any(flow.roles[source] is Role.SPINE for source in node.inputs)
        is_lone_update = node.mutates and index not in grouped and not follows
        if index in pins:
            pinned[index] = frozenset((pins[index],))
        elif node.parameters or is_lone_update:
            pinned[index] = frozenset((default_rank,))
    for index, ranks in fixed_ranks(flow, num_ranks, fixed).items():
        pinned[index] = (pinned[index] & ranks) or ranks
    return place_by_rank(flow, parameter_bytes, num_ranks, pinned, fixed, default_rank=default_rank)


def fixed_ranks(
    flow: Flow, num_ranks: int, fixed: Mapping[str, tuple[int, ...]]
) -> dict[int, frozenset[int]]:
    """Node index -> ranks on which a node may run because parameters that it reads must stay there.

    Raises:
        PartitionError: A rank out of range, or a node that reads parameters with no rank in common.
    """
    held = {name: frozenset(ranks) for name, ranks in fixed.items()}
    for name, ranks in held.items():
        if not ranks or not ranks.issubset(range(num_ranks)):
            raise PartitionError(
                f"The parameter {name!r} was placed on partition {_listed(ranks)}, but partitions "
                f"are {_valid_range(num_ranks)}. Keep pipeline_parallel_degree as it was."
            )
    allowed: dict[int, frozenset[int]] = {}
    for index in flow.order:
        node = flow.nodes[index]
        names = [name for name in node.parameters if name in held]
        if names:
            allowed[index] = frozenset.intersection(*(held[name] for name in names))
            if not allowed[index]:
                places = ", ".join(f"{name!r} on {_listed(held[name])}" for name in names)
                raise PartitionError(
                    f"{node.described()} reads parameters that earlier steps placed on different "
                    f"partitions ({places}). Call the step that needs them together first."
                )
    return allowed


def place_by_rank(
    flow: Flow,
    parameter_bytes: Mapping[str, int],
    num_ranks: int,
    allowed: Ranks,
    fixed: Mapping[str, tuple[int, ...]],
    *,
    default_rank: int = 0,
) -> Partition:
    """Form stages from the ranks on which pinned nodes may run.

    Parameters that are not `fixed`, that no node reads and that have no sibling are on
    `default_rank`.

    Raises:
        PartitionError: Nodes that must share a stage but cannot.
    """
    allowed = _share_in_groups(flow, allowed)
    level = _levels(flow, num_ranks, allowed, bool(fixed))
    has_inputs = any(node.kind is NodeKind.INPUT for node in flow.nodes)
    _sink(flow, num_ranks, allowed, level, has_inputs)
    _merge(flow, num_ranks, level, has_inputs)
    used = _used(level, has_inputs) or [0]
    stage = {number: place for place, number in enumerate(used)}
    return build_partition(
        flow,
        parameter_bytes,
        {index: stage[number] for index, number in level.items()},
        tuple(number % num_ranks for number in used),
        num_ranks,
        fixed,
        default_rank=default_rank,
    )


def _check_ranks(
    nodes: Sequence[GraphNode], num_ranks: int, pins: Mapping[int, int], default_rank: int
) -> None:
    """Report all modules with a rank out of range at once."""
    valid = range(num_ranks)
    wrong = {
        nodes[index].module_path or nodes[index].name: rank
        for index, rank in sorted(pins.items())
        if rank not in valid
    }
    problems = [f"{path!r} is on partition {rank}" for path, rank in wrong.items()]
    if default_rank not in valid:
        problems.append(f"default_partition is {default_rank}")
    if problems:
        raise PartitionError(
            f"Partitions are {_valid_range(num_ranks)}, but {', '.join(problems)}. Use an index "
            "below pipeline_parallel_degree, or raise the degree."
        )


def _share_in_groups(flow: Flow, allowed: Ranks) -> dict[int, frozenset[int]]:
    """Give every member of a group the ranks that all of its members allow."""
    shared = dict(allowed)
    is_changed = True
    while is_changed:
        is_changed = False
        for group in flow.groups:
            pinned = [index for index in group.members if index in shared]
            if not pinned:
                continue
            common = frozenset.intersection(*(shared[index] for index in pinned))
            if not common:
                raise PartitionError(_torn_group(flow, group.reason, pinned, shared))
            for index in group.members:
                is_changed |= shared.get(index) != common
                shared[index] = common
    return shared


def _torn_group(flow: Flow, reason: str, pinned: Sequence[int], ranks: Ranks) -> str:
    # The narrowest say most: each two may share a rank, and all together none.
    first = min(pinned, key=lambda index: len(ranks[index]))
    other = min(pinned, key=lambda index: (len(ranks[index] & ranks[first]), len(ranks[index])))
    return (
        f"{flow.nodes[first].described()} is on partition {_listed(ranks[first])} and "
        f"{flow.nodes[other].described()} on partition {_listed(ranks[other])}, but they must "
        f"share one: {reason}. Put both modules on the same partition."
    )


def _levels(flow: Flow, num_ranks: int, allowed: Ranks, has_fixed: bool) -> dict[int, int]:
    """Phase 1: the earliest level of every node; has anything been placed before?"""
    groups_of: dict[int, list[int]] = {}
    for number, group in enumerate(flow.groups):
        for index in group.members:
            groups_of.setdefault(index, []).append(number)
    floor = [0] * len(flow.groups)
    level: dict[int, int] = {}
    raised: int | None = None
    for _ in range(len(flow.groups) + 1):
        raised = None
        for index in sorted(flow.order):
            before = [level[source] for source in flow.nodes[index].inputs if source in level]
            floors = [floor[number] for number in groups_of.get(index, ())]
            level[index] = _next_level(max([0, *before, *floors]), allowed.get(index), num_ranks)
            for number in groups_of.get(index, ()):
                if level[index] > floor[number]:
                    floor[number] = level[index]
                    raised = number
        if raised is None:
            return level
    assert raised is not None
    group = flow.groups[raised]
    first, last = flow.nodes[group.members[0]], flow.nodes[group.members[-1]]
    raise PartitionError(
        f"{first.described()} and {last.described()} must share a stage, because {group.reason}, "
        "but the data between them passes through another partition. Put the modules in between "
        f"on the same partition.{_PLACED_BEFORE if has_fixed else ''}"
    )


_PLACED_BEFORE = (
    " Their parameters stay where the first call has put them; if there was no state yet then "
    "(None, say), begin with one of zeros, by which they are put together."
)


def _next_level(start: int, ranks: frozenset[int] | None, num_ranks: int) -> int:
    """The first level from `start` that belongs to one of the ranks."""
    if ranks is None:
        return start
    return start + min((rank - start) % num_ranks for rank in ranks)


def _used(level: Mapping[int, int], has_inputs: bool) -> list[int]:
    """Levels with nodes, ascending; inputs are on level 0."""
    used = set(level.values())
    return sorted(used | {0} if has_inputs else used)


def _sink(
    flow: Flow, num_ranks: int, allowed: Ranks, level: dict[int, int], has_inputs: bool
) -> None:
    """Phase 2: move work that needs no input next to its first reader."""
    used = _used(level, has_inputs)[::-1]
    for index in sorted(flow.movable, reverse=True):
        if not flow.consumers[index] or index in flow.beside:
            continue
        latest = min(level[consumer] for consumer in flow.consumers[index])
        ranks = allowed.get(index)
        level[index] = next(
            number
            for number in used
            if number <= latest and (ranks is None or number % num_ranks in ranks)
        )


def _merge(flow: Flow, num_ranks: int, level: dict[int, int], has_inputs: bool) -> None:
    """Phase 3: empty levels whose nodes can all wait for the next level of the same rank."""
    used = _used(level, has_inputs)
    for place, number in enumerate(used):
        later = [other for other in used[place + 1 :] if other % num_ranks == number % num_ranks]
        if not later or (number == 0 and has_inputs):
            continue
        members = [index for index, own in level.items() if own == number]
        readers = {level[reader] for index in members for reader in flow.consumers[index]}
        if all(reader == number or reader >= later[0] for reader in readers):
            level.update(dict.fromkeys(members, later[0]))


def _listed(ranks: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(ranks))) or "none"


def _valid_range(num_ranks: int) -> str:
    return "0" if num_ranks == 1 else f"0 to {num_ranks - 1}"
