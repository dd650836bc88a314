"""Which rank runs which stage, for schedules that give a rank several stages.

    looped, 2 ranks x 2     stage  0 1 2 3     a microbatch goes round the ranks twice
                            rank   0 1 0 1
    V, 2 ranks              stage  0 1 2 3     it goes there and back, and ends where it began
                            rank   0 1 1 0

Looped stages are those of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (SC 2021, section 2.2); the V is that of Qi et al., "Pipeline
Parallelism with Controllable Memory" (NeurIPS 2024). This module must not know orders of actions.
"""

from mpxla.errors import ScheduleError

__all__ = ["V_SHAPED", "is_looped", "is_v_shaped", "place_stages"]

V_SHAPED = ("zero_bubble_v",)
"""Schedules whose stages go there and back."""


def place_stages(pipeline: str, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The pipeline rank of every stage of a schedule; a V has two stages per rank.

    Raises:
        ScheduleError: a V with another number of stages per rank, or a count below one.
    """
    if num_ranks < 1 or stages_per_rank < 1:
        raise ScheduleError(
            f"{stages_per_rank} stages on each of {num_ranks} ranks cannot be placed. Use at least "
            "one of each."
        )
    if pipeline not in V_SHAPED:
        return tuple(range(num_ranks)) * stages_per_rank
    if stages_per_rank != 2:
        raise ScheduleError(
            f"pipeline: {pipeline!r} has two stages on each rank, not {stages_per_rank}. Set "
            "virtual_pipeline_degree to 2."
        )
    there = range(num_ranks)
    return (*there, *reversed(there))


def is_looped(placement: tuple[int, ...]) -> bool:
    """Whether the stages go round all ranks some whole number of times."""
    num_ranks = max(placement) + 1
    rest = len(placement) % num_ranks
    return rest == 0 and placement == tuple(range(num_ranks)) * (len(placement) // num_ranks)


def is_v_shaped(placement: tuple[int, ...]) -> bool:
    """Whether the stages go there and back once."""
    return placement == place_stages(V_SHAPED[0], max(placement) + 1, 2)
