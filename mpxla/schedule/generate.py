"""Schedules from integers: the order in which every rank runs forwards and backwards.

Where the best order is known (`patterns.py`) and fits the limits, that is it. Every other schedule
is a list schedule. A forward takes one tick and a backward two, about what they cost; whenever a
rank is free it takes the most urgent action that is *ready*, or waits:

    phase 1, ready:   F of a microbatch follows its F on the stage before; B follows its B on the
                      stage after, and on the last stage its F; a stage takes microbatches in order.
    phase 2, allowed: the policy may hold an action back, which bounds the activations in flight.
    phase 3, choose:  a backward before a forward, a forward before weight gradients, and an older
                      microbatch before a newer one.

`interleaved` over one stage per rank is the 1F1B order (Narayanan et al., "PipeDream", SOSP 2019;
the flushing variant of "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021), here with 3
stages and 4 microbatches (drawn as if forwards and backwards took equally long; with one stage per
rank the order is the same):

    rank 0   F0  F1  F2  .   .   B0  F3  B1  .   B2  .   B3
    rank 1   .   F0  F1  .   B0  F2  B1  F3  B2  .   B3  .
    rank 2   .   .   F0  B0  F1  B1  F2  B2  F3  B3  .   .

SMP's name for "a ready backward goes before a pending forward" is "interleaved" (its documentation,
"Pipeline execution schedule"). It becomes Megatron's interleaved schedule where a rank has several
(virtual) stages.

This module must not know costs, transfers or which values cross which boundary: it assumes that
every stage needs the one before it, so its order holds for any set of edges between stages.
"""

import difflib
from collections.abc import Callable, Sequence

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Action, Op
from mpxla.schedule.patterns import looped_1f1b, zero_bubble_h1, zero_bubble_v
from mpxla.schedule.placement import is_looped, is_v_shaped
from mpxla.schedule.timeline import stage_peaks

__all__ = [
    "SCHEDULES",
    "eager_1f1b",
    "forward_only",
    "generate",
    "interleaved",
    "simple",
    "zero_bubble",
]


def simple(
    num_microbatches: int, placement: Sequence[int], active_microbatches: int | None = None
) -> list[list[Action]]:
    """All forwards, then all backwards (fill and drain, as in GPipe).

    With `active_microbatches` below `num_microbatches` the pipeline fills and drains in rounds of
    that many; a rank ends each half of a round before it begins the next half. None: one round.
    """
    size = num_microbatches if active_microbatches is None else active_microbatches
    _check(num_microbatches, placement, size)
    run = _ListSchedule(num_microbatches, placement)

    def is_allowed(stage: int, op: Op) -> bool:
        siblings = run.stages[placement[stage]]
        if op is Op.FORWARD:
            begun = run.num_forwards[stage] // size * size
            return all(run.num_backwards[sibling] >= begun for sibling in siblings)
        round_end = (run.num_backwards[stage] // size + 1) * size
        needed = min(round_end, num_microbatches)
        return all(run.num_forwards[sibling] >= needed for sibling in siblings)

    return run.all_actions(is_allowed)


def interleaved(
    num_microbatches: int, placement: Sequence[int], active_microbatches: int
) -> list[list[Action]]:
    """A ready backward before a pending forward; with one stage per rank, 1F1B.

    Stage `s` of `S` holds at most `min(active_microbatches, S - s)` microbatches between their
    forward and their backward: later stages see their backwards sooner, so that more would not
    make the pipeline faster when all stages are equal.

    Looped stages (several on each rank, microbatches a multiple of the ranks) run in Megatron's
    order, as far as `active_microbatches` allows it: 2 P - 1 for P ranks are enough.
    """
    _check(num_microbatches, placement, active_microbatches)
    num_ranks = max(placement) + 1
    is_lapped = 1 < num_ranks < len(placement) and is_looped(tuple(placement))
    if is_lapped and num_microbatches % num_ranks == 0:
        pattern = looped_1f1b(num_microbatches, num_ranks, len(placement) // num_ranks)
        if _keeps(pattern, placement, active_microbatches):
            return pattern
    num_stages = len(placement)
    bounds = [min(active_microbatches, num_stages - s) for s in range(num_stages)]
    return _bounded(num_microbatches, placement, bounds)


def eager_1f1b(
    num_microbatches: int, placement: Sequence[int], active_microbatches: int
) -> list[list[Action]]:
    """1F1B with forwards early enough that no stage waits for a transfer in steady state.

    Stage `s` of `S` holds at most `min(active_microbatches, 2 (S - s) - 1)` microbatches. In 1F1B
    an activation is needed as soon as it is computed, so that every transfer lengthens the step;
    here it is on its way while its receiver works on the microbatch before. Where transfers take no
    time both are equally fast (Zhuang et al., "On Optimizing the Communication of Model
    Parallelism", MLSys 2023, section 4).
    """
    _check(num_microbatches, placement, active_microbatches)
    num_stages = len(placement)
    bounds = [min(active_microbatches, 2 * (num_stages - s) - 1) for s in range(num_stages)]
    return _bounded(num_microbatches, placement, bounds)


def zero_bubble(
    num_microbatches: int, placement: Sequence[int], active_microbatches: int
) -> list[list[Action]]:
    """Splits backwards, so that weight gradients fill the time in which ranks would wait.

    With one stage per rank in order this is ZB-H1; on a V, with at least 2 P microbatches for P
    ranks and 2 P - 1 of them active, no rank waits from its first to its last action. A microbatch
    is in flight at a stage from its forward to its weight gradients.
    """
    _check(num_microbatches, placement, active_microbatches)
    num_ranks, num_stages = max(placement) + 1, len(placement)
    if tuple(placement) == tuple(range(num_ranks)):
        return zero_bubble_h1(num_microbatches, num_ranks, active_microbatches)
    if is_v_shaped(tuple(placement)) and num_microbatches >= 2 * num_ranks:
        pattern = zero_bubble_v(num_microbatches, num_ranks)
        if _keeps(pattern, placement, active_microbatches):
            return pattern
    run = _ListSchedule(num_microbatches, placement, splits=True)

    def is_allowed(stage: int, op: Op) -> bool:
        begun = run.num_forwards[stage]
        bound = min(active_microbatches, num_stages - stage)
        return op is not Op.FORWARD or (
            begun - run.num_backwards[stage] < bound
            and begun - run.num_weights[stage] < active_microbatches
        )

    return run.all_actions(is_allowed)


def forward_only(num_microbatches: int, placement: Sequence[int]) -> list[list[Action]]:
    """Forwards alone, for evaluation: nothing is kept, so nothing bounds what is in flight."""
    _check(num_microbatches, placement, 1)
    return _ListSchedule(num_microbatches, placement, training=False).all_actions()


def generate(
    pipeline: str,
    num_microbatches: int,
    placement: Sequence[int],
    active_microbatches: int,
    training: bool,
) -> list[list[Action]]:
    """Generates the schedule that the configuration names, by the function of that name.

    Names are those in `SCHEDULES`; without backwards, every one means `forward_only`.

    Returns:
        One list of actions per pipeline rank, up to the highest in `placement`.

    Raises:
        ScheduleError: an unknown name, a count below one, or an empty or negative placement.
    """
    if pipeline not in SCHEDULES:
        nearest = difflib.get_close_matches(str(pipeline), SCHEDULES, n=1, cutoff=0.0)
        raise ScheduleError(
            f"pipeline: {pipeline!r} is not a schedule; the nearest is {nearest[0]!r}. "
            f"Use one of {', '.join(map(repr, sorted(SCHEDULES)))}."
        )
    if not training:
        return forward_only(num_microbatches, placement)
    return SCHEDULES[pipeline](num_microbatches, placement, active_microbatches)


SCHEDULES: dict[str, Callable[[int, Sequence[int], int], list[list[Action]]]] = {
    "interleaved": interleaved,
    "eager_1f1b": eager_1f1b,
    "simple": simple,
    "zero_bubble": zero_bubble,
    "zero_bubble_v": zero_bubble,
}
"""Name -> schedule. A name that implies a placement is given it by `place_stages`."""


def _bounded(
    num_microbatches: int, placement: Sequence[int], bounds: Sequence[int]
) -> list[list[Action]]:
    """Backwards first, and forwards as long as a stage holds fewer microbatches than its bound."""
    run = _ListSchedule(num_microbatches, placement)

    def is_allowed(stage: int, op: Op) -> bool:
        in_flight = run.num_forwards[stage] - run.num_backwards[stage]
        return op is Op.BACKWARD or in_flight < bounds[stage]

    return run.all_actions(is_allowed)


def _keeps(
    pattern: Sequence[Sequence[Action]], placement: Sequence[int], active_microbatches: int
) -> bool:
    """Whether no stage ever holds more microbatches than that."""
    return max(stage_peaks(pattern, len(placement))) <= active_microbatches


_TICKS = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.INPUT_GRADIENT: 1, Op.WEIGHT_GRADIENT: 1}


class _ListSchedule:
    """A schedule in the making; stages take microbatches in order, so counters describe it.

    They count what each stage has begun: forwards, backwards or their first parts, second parts.
    """

    def __init__(
        self,
        num_microbatches: int,
        placement: Sequence[int],
        training: bool = True,
        splits: bool = False,
    ):
        self.num_microbatches = num_microbatches
        self.num_stages = len(placement)
        self.stages: list[list[int]] = [[] for _ in range(max(placement) + 1)]
        for stage, rank in enumerate(placement):
            self.stages[rank].append(stage)
        self.num_forwards = [0] * self.num_stages
        self.num_backwards = [0] * self.num_stages
        self.num_weights = [0] * self.num_stages
        self._training = training
        self._splits = splits
        self._begun = {
            Op.FORWARD: self.num_forwards,
            Op.BACKWARD: self.num_backwards,
            Op.INPUT_GRADIENT: self.num_backwards,
            Op.WEIGHT_GRADIENT: self.num_weights,
        }
        # The arrivals of a stage: what the stages around it have finished. The first stage finds
        # all microbatches there.
        self._arrived = {
            Op.FORWARD: [num_microbatches] + [0] * self.num_stages,
            Op.BACKWARD: [0] * self.num_stages,
        }

    def all_actions(
        self, is_allowed: Callable[[int, Op], bool] = lambda stage, op: True
    ) -> list[list[Action]]:
        """Runs the clock until everything is done; `is_allowed(stage, op)` is the policy."""
        schedule: list[list[Action]] = [[] for _ in self.stages]
        running: dict[int, tuple[int, Action]] = {}
        per_microbatch = 1 + self._training + self._splits
        remaining = self.num_microbatches * self.num_stages * per_microbatch
        tick = 0
        while remaining:
            for rank in [rank for rank, (end, _) in running.items() if end == tick]:
                self._finish(running.pop(rank)[1])
                remaining -= 1
            for rank, actions in enumerate(schedule):
                if rank in running or not (candidates := self._candidates(rank, is_allowed)):
                    continue
                _, microbatch, stage, op = min(candidates)
                self._begun[op][stage] += 1
                actions.append(Action(stage, op, microbatch))
                running[rank] = (tick + _TICKS[op], actions[-1])
            assert running or not remaining, "the policy holds back every action that is ready"
            tick += 1
        return schedule

    def _finish(self, action: Action) -> None:
        """Tells the next stage, forwards or backwards, that a microbatch has arrived."""
        stage, op, _, _ = action
        if op is Op.FORWARD:
            self._arrived[Op.FORWARD][stage + 1] += 1
            if stage == self.num_stages - 1:
                self._arrived[Op.BACKWARD][stage] += 1
        elif op.begins_backward and stage > 0:
            self._arrived[Op.BACKWARD][stage - 1] += 1

    def _candidates(
        self, rank: int, is_allowed: Callable[[int, Op], bool]
    ) -> list[tuple[int, int, int, Op]]:
        """What a rank could do next, as (urgency, microbatch, stage, op); the least goes first."""
        found: list[tuple[int, int, int, Op]] = []
        arrived = self._arrived
        for stage in self.stages[rank]:
            forward, backward = self.num_forwards[stage], self.num_backwards[stage]
            begins = Op.INPUT_GRADIENT if self._splits else Op.BACKWARD
            if self._training and backward < arrived[Op.BACKWARD][stage]:
                if is_allowed(stage, begins):
                    found.append((0, backward, stage, begins))
            if self._splits and self.num_weights[stage] < backward:
                weight = self.num_weights[stage]
                found.append((2, weight, stage, Op.WEIGHT_GRADIENT))
            if forward < arrived[Op.FORWARD][stage] and is_allowed(stage, Op.FORWARD):
                found.append((1, forward, stage, Op.FORWARD))
        return found


def _check(num_microbatches: int, placement: Sequence[int], active_microbatches: int) -> None:
    problems: list[str] = []
    if num_microbatches < 1:
        problems.append(f"num_microbatches is {num_microbatches}; use at least 1")
    if active_microbatches < 1:
        problems.append(f"active_microbatches is {active_microbatches}; use at least 1")
    if not placement:
        problems.append("placement names no stage; give the pipeline rank of every stage")
    elif min(placement) < 0:
        problems.append(f"placement {tuple(placement)} has a negative rank; ranks start at 0")
    if problems:
        raise ScheduleError("No schedule can be generated: " + "; ".join(problems) + ".")
