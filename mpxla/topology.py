"""Where every rank sits: pipeline, tensor and data-parallel coordinates, and the groups they form.

Processes form a grid with three axes: D (replicas of the reduced data parallelism, "rdp"),
P (pipeline) and T (tensor). `placement_strategy` names the order of the axes; the right-most one
varies fastest over global ranks:

    rank = (i[c0] * n[c1] + i[c1]) * n[c2] + i[c2]     for the order c0 c1 c2

    "cluster" = DPT with 8 ranks, pp = 2, tp = 2:
        rdp 0: pp 0 -> ranks 0 1     rdp 1: pp 0 -> ranks 4 5
               pp 1 -> ranks 2 3            pp 1 -> ranks 6 7
                    (tp 0 1)                     (tp 0 1)

A group holds the ranks that agree on some coordinates (`_FIXED`), ordered by global rank, and a
rank's index in its group is its `pp_rank`, `dp_rank` and so on. So the tensor-parallel group is
part of both the data-parallel and the model-parallel group, and
mp_size * rdp_size == pp_size * dp_size == size.

Everything here is arithmetic. It must not know of processes, transports, torch or the session.
"""

import operator
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import NamedTuple

from mpxla.config_keys import PLACEMENT_ORDERS
from mpxla.errors import TopologyError

__all__ = ["CommGroup", "Coordinates", "RankType", "Topology"]


class CommGroup(Enum):
    """Selects the group of ranks that a communication involves, seen from the calling rank."""

    WORLD = "WORLD"
    """All ranks."""
    MP_GROUP = "MP_GROUP"
    """The ranks that hold one replica of the model."""
    DP_GROUP = "DP_GROUP"
    """The ranks that hold the same pipeline partition."""
    PP_GROUP = "PP_GROUP"
    """The ranks of one pipeline."""
    TP_GROUP = "TP_GROUP"
    """The ranks that share the tensors of one partition."""
    RDP_GROUP = "RDP_GROUP"
    """The ranks that hold the same tensors."""


class RankType(Enum):
    """Says in which group of the calling rank an integer is to be read as a rank."""

    WORLD_RANK = "WORLD_RANK"
    """Global rank."""
    MP_RANK = "MP_RANK"
    """Index in the model-parallel group."""
    DP_RANK = "DP_RANK"
    """Index in the data-parallel group."""
    PP_RANK = "PP_RANK"
    """Index in the pipeline group."""
    TP_RANK = "TP_RANK"
    """Index in the tensor-parallel group."""
    RDP_RANK = "RDP_RANK"
    """Index in the reduced-data-parallel group."""


class Coordinates(NamedTuple):
    """Place of a rank on the three axes of the grid."""

    rdp: int
    pp: int
    tp: int


_AXES = {"D": "rdp", "P": "pp", "T": "tp"}
# Coordinates on which the members of a group agree.
_FIXED: dict[CommGroup, tuple[str, ...]] = {
    CommGroup.WORLD: (),
    CommGroup.MP_GROUP: ("rdp",),
    CommGroup.DP_GROUP: ("pp",),
    CommGroup.PP_GROUP: ("rdp", "tp"),
    CommGroup.TP_GROUP: ("rdp", "pp"),
    CommGroup.RDP_GROUP: ("pp", "tp"),
}
_GROUP_OF: dict[RankType, CommGroup] = {
    RankType.WORLD_RANK: CommGroup.WORLD,
    RankType.MP_RANK: CommGroup.MP_GROUP,
    RankType.DP_RANK: CommGroup.DP_GROUP,
    RankType.PP_RANK: CommGroup.PP_GROUP,
    RankType.TP_RANK: CommGroup.TP_GROUP,
    RankType.RDP_RANK: CommGroup.RDP_GROUP,
}


@dataclass(frozen=True)
class Topology:
    """The grid of ranks. Ranks are global ranks wherever nothing else is said."""

    size: int
    """Number of processes."""
    pp: int = 1
    """Pipeline degree."""
    tp: int = 1
    """Tensor-parallel degree."""
    placement_strategy: str = "cluster"
    """`"cluster"`, `"spread"` or a permutation of `D`, `P`, `T`."""
    sdp: int = 1
    """Ranks of a reduced-data-parallel group that divide parameters among them."""

    def __post_init__(self) -> None:
        """Checks that the processes fill the grid.

        Raises:
            TopologyError: A degree is below 1, the degrees do not divide the number of processes,
                or the placement strategy is unknown.
        """
        for name, value in (
            ("number of processes", self.size),
            ("pipeline_parallel_degree", self.pp),
            ("tensor_parallel_degree", self.tp),
        ):
            if value < 1:
                raise TopologyError(f"{name}: {value} must be at least 1")
        if self.placement_strategy not in PLACEMENT_ORDERS:
            raise TopologyError(
                f"placement_strategy: {self.placement_strategy!r} must be one of "
                f"{', '.join(PLACEMENT_ORDERS)}"
            )
        if self.size % self.mp_size:
            below = self.size // self.mp_size * self.mp_size
            advice = f"{below} or {below + self.mp_size}" if below else f"{self.mp_size}"
            raise TopologyError(
                f"{self.size} processes cannot be divided into replicas of {self.mp_size} "
                f"(pipeline_parallel_degree {self.pp} x tensor_parallel_degree {self.tp}): start "
                f"{advice} processes, or change the degrees"
            )
        if self.sdp < 1 or self.rdp_size % self.sdp:
            raise TopologyError(
                f"sharded_data_parallel_degree: {self.sdp} must divide the number of replicas, "
                f"which is {self.rdp_size}"
            )

    @property
    def pp_size(self) -> int:
        """Ranks of a pipeline group."""
        return self.pp

    @property
    def tp_size(self) -> int:
        """Ranks of a tensor-parallel group."""
        return self.tp

    @property
    def mp_size(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.pp * self.tp

    @property
    def rdp_size(self) -> int:
        """Ranks that hold the same tensors."""
        return self.size // self.mp_size

    @property
    def dp_size(self) -> int:
        """Ranks that hold the same pipeline partition."""
        return self.rdp_size * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the place of a rank on the grid.

        Args:
            rank: Global rank.

        Returns:
            Its index on each axis.

        Raises:
            TopologyError: There is no such rank.
        """
        number = self._check_index(rank, self.size, "global rank", "processes")
        return Coordinates(
            **{axis: number // stride % length for axis, length, stride in self._grid()}
        )

    def group(self, group: CommGroup, rank: int) -> tuple[int, ...]:
        """Returns the group of a rank.

        Args:
            group: Which group.
            rank: Global rank whose group is wanted.

        Returns:
            Global ranks in ascending order; `rank` is one of them.

        Raises:
            TopologyError: `group` is no `CommGroup`, or there is no such rank.
        """
        # Scripts pass anything, lists of ranks included.
        if not isinstance(group, CommGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(
                f"a group must be a member of smp.CommGroup such as smp.PP_GROUP, got {group!r}"
            )
        place = self.coordinates(rank)
        fixed = _FIXED[group]
        offsets = [
            [getattr(place, axis) * stride] if axis in fixed else range(0, length * stride, stride)
            for axis, length, stride in self._grid()
        ]
        # The slowest axis comes first, so the ranks come out in ascending order.
        return tuple(sum(member) for member in product(*offsets))

    def groups(self, group: CommGroup) -> tuple[tuple[int, ...], ...]:
        """Returns all groups of a kind, ordered by their first rank; each rank is in one of them.

        Args:
            group: Which kind of group.
        """
        return tuple(sorted({self.group(group, rank) for rank in range(self.size)}))

    def to_global(self, index: int, rank_type: RankType, rank: int) -> int:
        """Translates an index in one of the caller's groups to a global rank.

        Args:
            index: Rank as the caller writes it.
            rank_type: How the caller means it.
            rank: Global rank of the caller.

        Returns:
            The global rank meant.

        Raises:
            TopologyError: `rank_type` is no `RankType`, or the group has no such index.
        """
        members = self.group(self._group_of(rank_type), rank)
        name, kind = rank_type.value, _GROUP_OF[rank_type].value
        where = f"ranks in {kind} of rank {rank}"
        return members[self._check_index(index, len(members), name, where)]

    def index(self, rank_type: RankType, rank: int) -> int:
        """Returns the position of a rank in its own group; the inverse of `to_global`.

        Args:
            rank_type: Which group.
            rank: Global rank.

        Returns:
            The position, from 0.

        Raises:
            TopologyError: `rank_type` is no `RankType`, or there is no such rank.
        """
        return self.group(self._group_of(rank_type), rank).index(rank)

    def mp_rank(self, rank: int) -> int:
        """Returns the index of a rank in its model-parallel group."""
        return self.index(RankType.MP_RANK, rank)

    def dp_rank(self, rank: int) -> int:
        """Returns the index of a rank in its data-parallel group."""
        return self.index(RankType.DP_RANK, rank)

    def pp_rank(self, rank: int) -> int:
        """Returns the index of a rank in its pipeline group, which is the partition it holds."""
        return self.coordinates(rank).pp

    def tp_rank(self, rank: int) -> int:
        """Returns the index of a rank in its tensor-parallel group."""
        return self.coordinates(rank).tp

    def rdp_rank(self, rank: int) -> int:
        """Returns the index of a rank in its reduced-data-parallel group."""
        return self.coordinates(rank).rdp

    def world_group(self) -> tuple[int, ...]:
        """Returns all ranks."""
        return tuple(range(self.size))

    def mp_group(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that hold the same replica of the model."""
        return self.group(CommGroup.MP_GROUP, rank)

    def dp_group(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that hold the same pipeline partition."""
        return self.group(CommGroup.DP_GROUP, rank)

    def pp_group(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of the same pipeline."""
        return self.group(CommGroup.PP_GROUP, rank)

    def tp_group(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that share the tensors of one partition."""
        return self.group(CommGroup.TP_GROUP, rank)

    def rdp_group(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that hold the same tensors."""
        return self.group(CommGroup.RDP_GROUP, rank)

    def sdp_group(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that hold the parameters of a rank together, a part each.

        They are consecutive chunks of the reduced-data-parallel groups.
        """
        replicas = self.rdp_group(rank)
        first = replicas.index(rank) // self.sdp * self.sdp
        return replicas[first : first + self.sdp]

    def sdp_replicas(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that hold the same part of the parameters as a rank."""
        replicas = self.rdp_group(rank)
        return replicas[replicas.index(rank) % self.sdp :: self.sdp]

    def sdp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns all groups of both kinds, ordered by their first rank."""
        ranks = range(self.size)
        return tuple(sorted({g for r in ranks for g in (self.sdp_group(r), self.sdp_replicas(r))}))

    def _grid(self) -> list[tuple[str, int, int]]:
        """Axes with their lengths and strides in global ranks, slowest first."""
        lengths = Coordinates(rdp=self.rdp_size, pp=self.pp, tp=self.tp)
        grid: list[tuple[str, int, int]] = []
        stride = self.size
        for letter in PLACEMENT_ORDERS[self.placement_strategy]:
            axis = _AXES[letter]
            length = getattr(lengths, axis)
            stride //= length
            grid.append((axis, length, stride))
        return grid

    @staticmethod
    def _group_of(rank_type: RankType) -> CommGroup:
        # Scripts pass anything, strings included.
        if not isinstance(rank_type, RankType):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(
                "a rank type must be a member of smp.RankType such as smp.RankType.PP_RANK, got "
                f"{rank_type!r}"
            )
        return _GROUP_OF[rank_type]

    @staticmethod
    def _check_index(index: int, length: int, name: str, what: str) -> int:
        try:
            number = operator.index(index)
        except TypeError:
            raise TopologyError(f"{name} must be an integer, got {index!r}") from None
        if not 0 <= number < length:
            raise TopologyError(
                f"{name} {number} does not exist: there are {length} {what}, so it must be from 0 "
                f"to {length - 1}"
            )
        return number
