"""Copies of trained modules: a teacher beside its student, target networks beside online ones.

After each update, scripts average weights of one into the other, parameter by parameter:

    for target, online in zip(copy.parameters(), model.parameters()):
        target.data.lerp_(online.data, 0.01)

So a copy lives where its original does. This module says which is whose, by names and shapes, and
in which order a graph is cut so that both are on one stage. It must not know how.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from mpxla.graph.partition.words import GraphNode

__all__ = ["Path", "find_twins", "wanted_places"]

Path = tuple[str, ...]
"""Names of modules, and of a tensor in the last one."""


def find_twins(tensors: Mapping[Path, Hashable], trained: AbstractSet[Path]) -> dict[Path, Path]:
    """The trained original of each tensor of a copy.

    A module is a copy if nothing in it is trained and another one, part of which is, has all its
    tensors under the same names and of the same kind. Of several originals it takes the first that
    has no copy yet: `q1, q2, target_1, target_2` are two pairs.

    Args:
        tensors: kind (shape, dtype) of each parameter and buffer.
        trained: those that get gradients.
    """
    inside: dict[Path, list[Path]] = defaultdict(list)
    for path in tensors:
        for length in range(1, len(path)):
            inside[path[:length]].append(path)
    modules_with: dict[Path, list[Path]] = defaultdict(list)
    for path in tensors:
        for length in range(1, len(path)) if path in trained else ():
            modules_with[path[length:]].append(path[:length])

    def is_copy(module: Path, original: Path) -> bool:
        depth = len(module)
        return all(
            path not in trained and tensors.get((*original, *path[depth:])) == tensors[path]
            for path in inside[module]
        )

    found: dict[Path, Path] = {}
    taken: set[Path] = set()
    for path in tensors:
        if path in trained or path in found:
            continue
        lengths = (length for length in range(1, len(path)) if path[length:] in modules_with)
        depth = next(lengths, None)  # of the longest end that a trained tensor's name has, too
        if depth is None:
            continue
        module = path[:depth]
        originals = [one for one in modules_with[path[depth:]] if is_copy(module, one)]
        if originals:
            original = next((one for one in originals if one not in taken), originals[0])
            taken.add(original)
            found |= {copied: (*original, *copied[depth:]) for copied in inside[module]}
    return found


def wanted_places(
    nodes: Sequence[GraphNode], fixed: AbstractSet[int], twins: Mapping[str, str]
) -> tuple[dict[int, int], dict[int, int]]:
    """Where nodes of copies stand in the order of cutting: next to those of their originals.

        program order     t0 t1 t2 s0 s1 s2     teacher and student
        cutting order     t0 s0 t1 s1 t2 s2

    Args:
        nodes: of a graph, in program order.
        fixed: nodes that have a place of their own in the order of cutting; others follow readers.
        twins: the original of each parameter of a copy.

    Returns:
        (place of each fixed node, the node of the original that each node of a copy follows).
    """
    partners = _partners(nodes, fixed, twins)
    places: dict[int, int] = {}
    following: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if index not in fixed:
            continue
        inputs = [source for source in node.inputs if source in fixed]
        last = max(inputs, key=places.__getitem__, default=None)
        other = partners.get(index)
        if other is None and last is not None and following.keys() >= set(inputs):
            other = following[last]
        if other is not None:
            following[index] = other
        place = index if other is None else other
        places[index] = place if last is None else max(place, places[last])
    return places, following


def _partners(
    nodes: Sequence[GraphNode], fixed: AbstractSet[int], twins: Mapping[str, str]
) -> dict[int, int]:
    """The reader of an original's parameter for each reader of its copy's.

    A copy that computes on what its original has computed, or the other way round, comes after it
    as a whole: the layers of one cannot be next to those of the other.
    """
    read: list[dict[str, None]] = []  # what a node reads, also by way of casts and views
    readers: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        beside = (read[source] for source in node.inputs if source not in fixed)
        read.append(dict.fromkeys((*node.parameters, *(name for one in beside for name in one))))
        for name in read[index] if index in fixed else ():
            readers[name].append(index)
    partners: dict[int, int] = {}
    for copied, original in twins.items():
        others = readers.get(original, [])
        for place, index in enumerate(readers.get(copied, ()) if others else ()):
            partner = others[min(place, len(others) - 1)]
            partners[index] = max(partners.get(index, 0), partner)
    ends = {*partners, *partners.values()}
    before: list[int] = []  # bit per node of these that a node depends on
    for index, node in enumerate(nodes):
        bits = 1 << index if index in ends else 0
        for source in node.inputs:
            bits |= before[source]
        before.append(bits)
    return {
        index: partner
        for index, partner in partners.items()
        if not (before[index] >> partner & 1 or before[partner] >> index & 1)
    }
