"""How the ranks that hold parameters together agree on a call of a step function.

Each of them gathers the others' parts while it runs, so that all have to run the same function; one
that runs another, or none, would leave the rest waiting. They compare before every call. Batches
may differ, as those of other replicas may. This module must not know how parameters are divided.
"""

from mpxla.comm.objects import Objects
from mpxla.comm.transport import Group
from mpxla.errors import RankMismatch

__all__ = ["ShardedCalls"]


class ShardedCalls:
    """The first pipeline ranks of the replicas of one sharding group.

    Args:
        objects: the session's object communication.
        ranks: global ranks of the group.
    """

    def __init__(self, objects: Objects, ranks: Group):
        self._objects = objects
        self._ranks = ranks

    def compare(self, text: str) -> None:
        """Checks that all ranks make one call. All of them call it.

        Args:
            text: the call, or the error that it ended in.

        Raises:
            RankMismatch: another rank makes another call; on all of them.
        """
        if len(self._ranks) == 1:
            return
        everyone = self._objects.allgather(text, self._ranks)
        for rank, other in zip(self._ranks, everyone, strict=True):
            if other != everyone[0]:
                raise RankMismatch(
                    f"the ranks {list(self._ranks)} hold the parameters of a model together "
                    f"(sharded_data_parallel_degree), and have to call the same step functions in "
                    f"the same order: rank {self._ranks[0]} came with {everyone[0]}, and rank "
                    f"{rank} with {other}. Evaluate and log on all of them, or on none."
                )
