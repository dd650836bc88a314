"""Replica groups: which ranks a collective joins, and which other groups stand beside it.

A collective inside an XLA program names all groups that run it at the same time, not only the
caller's: a *mesh* of disjoint groups of one size, ranks ascending, over all ranks. Every member
then has the same program text, and devices that set up communicators per mesh (Neuron) set up few.

A transfer between two stages is a collective over a group of two. Two transfers that share a rank
cannot be in one mesh, so pairs are *coloured* by the distance of the stages and the parity of their
block, for all pipelines at once:

    4 stages in a row    colour 0:  (0 1) (2 3)        colour 1:  (1 2), and what is left: (0 3)
    5 stages in a row    colour 0:  (0 1) (2 3)  4     colour 1:  0  (1 2) (3 4)
    5 stages in a ring   the same, and a further colour for the edge that closes it: (0 4) (1 2)  3

A ring with an even number of stages needs no third colour: colour 1 closes it. Ranks that no pair
takes are paired with each other, across pipelines where a pipeline has an odd one. In a world of an
odd number of ranks one stays alone; such a mesh is a program of the other ranks only, which devices
whose processes form one fixed world cannot run (`Mesh.members`).

Pure; it must not know tensors or transports. neuronx-distributed forms the same pairs for even
numbers of stages (pipeline/comm.py, parallel_layers/parallel_state.py).
"""

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from mpxla.comm.transport import Group

__all__ = ["Mesh", "Meshes", "complete"]


class Mesh(NamedTuple):
    """Disjoint groups of one size, ascending, that take part in one program."""

    groups: tuple[Group, ...]
    """Global ranks; the groups in the order of their first rank."""

    @property
    def members(self) -> Group:
        """All ranks of the program, ascending: its replicas, in this order."""
        return tuple(sorted(chain.from_iterable(self.groups)))

    def replica_groups(self) -> list[list[int]]:
        """The groups as XLA wants them: by index among the members."""
        index = {rank: number for number, rank in enumerate(self.members)}
        return [[index[rank] for rank in group] for group in self.groups]

    def __str__(self) -> str:
        return " ".join("{" + ",".join(map(str, group)) + "}" for group in self.groups)


def complete(groups: Iterable[Group], world_size: int) -> Mesh:
    """Adds groups of the ranks that are left to disjoint ones of one size: as many as there are."""
    given = [tuple(group) for group in groups]
    size = len(given[0])
    taken = set(chain.from_iterable(given))
    rest = iter([rank for rank in range(world_size) if rank not in taken])
    while len(further := tuple(islice(rest, size))) == size:
        given.append(further)
    return Mesh(tuple(sorted(given)))


class Meshes:
    """Finds the mesh of a group or a pair. All ranks of a world must give it the same groups."""

    def __init__(self, world_size: int, pipelines: Sequence[Group] = ()) -> None:
        """Takes the ranks of every pipeline, in the order of their stages."""
        self._world_size = world_size
        self._pipelines = [tuple(pipeline) for pipeline in pipelines if len(pipeline) > 1]
        self._of_group: dict[Group, Mesh] = {}

    def add(self, groups: Sequence[Group]) -> None:
        """Takes in groups: a run of equal size over all ranks becomes one mesh.

        `Topology.groups` gives such runs, one per kind of group. Groups that are in none get a mesh
        of their own, completed with ranks as they come.
        """
        ordered = list(dict.fromkeys(tuple(group) for group in groups))
        for start, first in enumerate(ordered):
            count = self._world_size // max(len(first), 1)
            run = ordered[start : start + count]
            same_size = all(len(group) == len(first) for group in run)
            if same_size and len(set(chain.from_iterable(run))) == self._world_size:
                for group in run:
                    self._of_group.setdefault(group, Mesh(tuple(sorted(run))))

    def of_group(self, group: Group) -> Mesh:
        """The mesh that a collective of a group runs with."""
        if group not in self._of_group:
            self._of_group[group] = complete([group], self._world_size)
        return self._of_group[group]

    def of_pair(self, source: int, target: int) -> Mesh:
        """The mesh that a transfer between two ranks runs with, in either direction."""
        pair = tuple(sorted((source, target)))
        for pipeline in self._pipelines:
            if source in pipeline and target in pipeline:
                low, high = sorted((pipeline.index(source), pipeline.index(target)))
                return self._coloured(high - low, low // (high - low) % 2)
        return complete([pair], self._world_size)

    def _coloured(self, distance: int, colour: int) -> Mesh:
        """All pairs of stages at a distance, of one colour, in all pipelines."""
        pairs: list[Group] = []
        left: list[int] = []
        for pipeline in self._pipelines:
            taken: set[int] = set()
            for low in range(len(pipeline) - distance):
                if low // distance % 2 == colour:
                    ends = pipeline[low], pipeline[low + distance]
                    pairs.append(tuple(sorted(ends)))
                    taken.update(ends)
            alone = [rank for rank in pipeline if rank not in taken]
            while len(alone) > 1:
                pairs.append(tuple(sorted((alone.pop(0), alone.pop(0)))))
            left += alone
        pairs += [tuple(sorted(two)) for two in zip(left[::2], left[1::2], strict=False)]
        return complete(sorted(pairs), self._world_size)
