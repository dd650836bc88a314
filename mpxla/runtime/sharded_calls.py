"""How the ranks that hold parameters together agree on a call of a step function.

Each of them gathers the others' parts while it runs, so that all have to run the same function, and
go the same way through it: one that gathers something else would get a mixture of two parameters,
and one that runs nothing would leave the rest waiting. They compare before every call. Where one
has to make a plan first, all compare once more when it is there. Batches may differ, as those of
other replicas may. This module must not know how parameters are divided.
"""

from collections.abc import Sequence
from typing import Any

from mpxla.comm.agreement import agreed, check_agreement
from mpxla.comm.objects import Objects
from mpxla.comm.transport import Group
from mpxla.runtime.plans import Plan

__all__ = ["ShardedCalls"]

_ADVICE = (
    "They hold the parameters of a model together (sharded_data_parallel_degree), and have to go "
    "the same way through its layers. Give the step function arguments that lead to the same "
    "layers on all of them, freeze the same parameters, and draw numbers that choose layers from "
    "equal seeds."
)


class ShardedCalls:
    """The first pipeline ranks of the replicas of one sharding group."""

    def __init__(self, objects: Objects, ranks: Group):
        self._objects = objects
        self._ranks = ranks

    def compare(self, text: str, plan: Plan | None, line: str = "") -> None:
        """Checks that all ranks make one call, or end in one error. All of them call it.

        Without a plan yet, `settle` has to follow. The user's line is for the text.

        Raises:
            RankMismatch: another rank makes another call; on all of them.
        """

        def problem(others: list[int], first: Sequence[Any], other: Sequence[Any]) -> str:
            return (
                f"the ranks {list(self._ranks)} hold the parameters of a model together "
                f"(sharded_data_parallel_degree), and have to call the same step functions, "
                f"and what gathers parameters or norms, in the same order: rank "
                f"{self._ranks[0]} came with {first[0]}{first[2]}, and rank {others[0]} with "
                f"{other[0]}{other[2]}. Evaluate, save and log on all of them, or on none; what "
                f"is for one rank alone goes into `if smp.rank() == 0:` after such a call."
            )

        digest = None if plan is None else plan.digest
        own = text, digest, line
        everyone = agreed(self._objects, self._ranks, own, problem, lambda call: call[0])
        if plan is not None and any(d is None or d != digest for _, d, _ in everyone):
            self.settle(plan.exchanges)

    def settle(self, exchanges: Sequence[str]) -> None:
        """Checks that all ranks gather and scatter the same. All of them call it, or none.

        Raises:
            RankMismatch: another rank does something else; on all of them.
        """
        what = "gather or scatter other parameters in this call"
        check_agreement(self._objects, self._ranks, exchanges, what, _ADVICE)
