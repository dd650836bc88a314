"""The schedule of some microbatches of a step: that of the first ones, with their numbers.

Without all actions of some microbatches, what is left keeps its order, so that a schedule free of
deadlock stays so. The first n microbatches of a schedule are those of a schedule of n.
"""

from collections.abc import Sequence

from mpxla.schedule.action import Action, Op

__all__ = ["actions_of"]


def actions_of(
    actions: Sequence[Action], microbatches: Sequence[int], reduces: bool = True
) -> tuple[Action, ...]:
    """One rank's actions for some microbatches, in order; gradients may be complete then."""
    kept = (
        action
        for action in actions
        if (reduces or action.op is not Op.REDUCE)
        and (action.microbatch is None or action.microbatch < len(microbatches))
    )
    return tuple(
        action if action.microbatch is None else action._replace(microbatch=microbatches[number])
        for action in kept
        for number in [action.microbatch or 0]
    )
