"""The best schedule under a limit of memory, by simulating the candidates.

A candidate is a schedule, a number of stages per rank, a number of microbatches and a limit of
microbatches in flight. What it costs is the caller's business: more microbatches are smaller ones,
more stages per rank send more. This module must not know models or devices.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Schedule
from mpxla.schedule.analysis import StageBytes, peak_bytes
from mpxla.schedule.copies import add_copies
from mpxla.schedule.dataflow import Edge
from mpxla.schedule.generate import SCHEDULES, generate
from mpxla.schedule.lower import add_communication, add_reduce
from mpxla.schedule.placement import V_SHAPED, place_stages
from mpxla.schedule.simulate import Costs, simulate
from mpxla.schedule.timeline import Timeline

__all__ = [
    "Candidate",
    "Found",
    "Simulated",
    "StepCosts",
    "candidates",
    "compute_lists",
    "search",
    "simulated",
]


@dataclass(frozen=True)
class Candidate:
    """One way to run a step: a schedule, virtual stages, microbatches, and how many in flight.

    `share` is how much stages keep of what is dear to compute again.
    """

    pipeline: str
    stages_per_rank: int
    num_microbatches: int
    active_microbatches: int
    share: float = 1.0

    def __str__(self) -> str:
        return (
            f"{self.pipeline}, {self.stages_per_rank} per rank, {self.num_microbatches} "
            f"microbatches, {self.active_microbatches} active"
            f"{'' if self.share == 1 else f', {100 * self.share:g} % kept'}"
        )


@dataclass(frozen=True)
class StepCosts:
    """What a step costs when it is cut for a candidate.

    Durations are seconds; `held` are activations of one microbatch, by stage; `fixed_bytes` are
    parameters, gradients and optimizer state, by rank.
    """

    costs: Costs
    forward_edges: frozenset[Edge]
    backward_edges: frozenset[Edge]
    held: Sequence[StageBytes]
    fixed_bytes: Sequence[int]


class Simulated(NamedTuple):
    """When everything of a step runs; per rank, the peak of activations, and all bytes."""

    timeline: Timeline
    activation_bytes: tuple[int, ...]
    rank_bytes: tuple[int, ...]


def simulated(
    schedule: Schedule, placement: Sequence[int], step: StepCosts, most_bytes: float = math.inf
) -> Simulated:
    """Runs a schedule with costs, if messages do not hold ranks.

    No rank keeps more than `most_bytes` of activations: the rest is computed again.
    """
    edges = step.forward_edges, step.backward_edges
    timeline = simulate(schedule, placement, *edges, step.costs, rendezvous=False)
    peaks = tuple(int(min(peak, most_bytes)) for peak in peak_bytes(schedule, step.held))
    together = tuple(a + b for a, b in zip(peaks, step.fixed_bytes, strict=True))
    return Simulated(timeline, peaks, together)


@dataclass(frozen=True)
class Found:
    """A candidate with the seconds and the memory of every rank that it was predicted to take.

    The bubble is the share of the time in which ranks run no program.
    """

    candidate: Candidate
    step_s: float
    bubble: float
    rank_bytes: tuple[int, ...]


def candidates(
    num_ranks: int,
    microbatch_counts: Iterable[int],
    stages_per_rank: Iterable[int] = (1, 2),
    pipelines: Iterable[str] = SCHEDULES,
) -> list[Candidate]:
    """All sensible combinations, with several limits of microbatches in flight each.

    A V always has two stages per rank.
    """
    found: dict[Candidate, None] = {}
    per_rank_choices = tuple(stages_per_rank)
    for count in microbatch_counts:
        limits = {min(limit, count) for limit in (1, 2, num_ranks, 2 * num_ranks, count)}
        for pipeline in pipelines:
            for per_rank in (2,) if pipeline in V_SHAPED else per_rank_choices:
                for limit in sorted(limits):
                    found[Candidate(pipeline, per_rank, count, limit)] = None
    return list(found)


def search(
    num_ranks: int,
    tried: Iterable[Candidate],
    costs_of: Callable[[Candidate], StepCosts],
    memory_limit_bytes: int | None = None,
    horizon: int | None = None,
) -> list[Found]:
    """Simulates candidates and sorts those that fit into memory, the fastest first.

    With a horizon, saved values are moved to the host, and come back so many computes before their
    backward.

    Returns:
        What fits; of equally fast ones the one with less memory first.

    Raises:
        ScheduleError: nothing fits; the text says what comes nearest.
    """
    found = [_try(num_ranks, candidate, costs_of(candidate), horizon) for candidate in tried]
    limit = memory_limit_bytes
    fitting = [f for f in found if limit is None or max(f.rank_bytes) <= limit]
    if not fitting:
        least = min(found, key=lambda f: max(f.rank_bytes), default=None)
        nearest = (
            f"the least, {least.candidate}, needs {max(least.rank_bytes)}"
            if least
            else "none tried"
        )
        raise ScheduleError(
            f"No schedule fits into {limit} bytes per rank: {nearest}. Use more ranks, smaller "
            "microbatches, or a higher limit."
        )
    return sorted(fitting, key=lambda f: (f.step_s, max(f.rank_bytes), str(f.candidate)))


@functools.lru_cache(maxsize=16)
def compute_lists(num_ranks: int, candidate: Candidate) -> Schedule:
    """Forwards and backwards of every rank, which tell what it keeps."""
    lists = generate(
        candidate.pipeline,
        candidate.num_microbatches,
        place_stages(candidate.pipeline, num_ranks, candidate.stages_per_rank),
        candidate.active_microbatches,
        training=True,
    )
    return tuple(map(tuple, lists))


# Steps of other costs, such as other widths of a model, have the same lists.
@functools.lru_cache(maxsize=16)
def _all_lists(
    num_ranks: int,
    candidate: Candidate,
    forward: frozenset[Edge],
    backward: frozenset[Edge],
    horizon: int | None,
) -> Schedule:
    """The same with transfers, reductions and copies."""
    placement = place_stages(candidate.pipeline, num_ranks, candidate.stages_per_rank)
    lists = add_communication(compute_lists(num_ranks, candidate), placement, forward, backward)
    lists = add_reduce(lists)
    return tuple(map(tuple, lists if horizon is None else add_copies(lists, horizon)))


def _try(num_ranks: int, candidate: Candidate, step: StepCosts, horizon: int | None) -> Found:
    placement = place_stages(candidate.pipeline, num_ranks, candidate.stages_per_rank)
    edges = step.forward_edges, step.backward_edges
    schedule = _all_lists(num_ranks, candidate, *edges, horizon)
    timeline, _, rank_bytes = simulated(schedule, placement, step)
    return Found(candidate, timeline.makespan, timeline.bubble, rank_bytes)
