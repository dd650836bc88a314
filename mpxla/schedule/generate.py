"""Schedules from integers: the order in which every rank runs forwards and backwards.

Every schedule here is a list schedule. A forward takes one tick and a backward two, about what they
cost; whenever a rank is free it takes the most urgent action that is *ready*, or waits:

    phase 1, ready:   F of a microbatch follows its F on the stage before; B follows its B on the
                      stage after, and on the last stage its F; a stage takes microbatches in order.
    phase 2, allowed: the policy may hold an action back, which bounds the activations in flight.
    phase 3, choose:  a backward before a forward, and an older microbatch before a newer one.

`interleaved` over one stage per rank is the 1F1B order (Narayanan et al., "PipeDream", SOSP 2019;
the flushing variant of "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021), here with 3
stages and 4 microbatches (drawn as if forwards and backwards took equally long; with one stage per
rank the order is the same):

    rank 0   F0  F1  F2  .   .   B0  F3  B1  .   B2  .   B3
    rank 1   .   F0  F1  .   B0  F2  B1  F3  B2  .   B3  .
    rank 2   .   .   F0  B0  F1  B1  F2  B2  F3  B3  .   .

SMP's name for "a ready backward goes before a pending forward" is "interleaved" (its documentation,
"Pipeline execution schedule"); it is not Megatron's interleaved schedule of virtual stages. Where
a rank owns several stages the same rules apply.

This module must not know costs, transfers or which values cross which boundary: it assumes that
every stage needs the one before it, so its order holds for any set of edges between stages.
"""

import difflib
from collections.abc import Callable, Sequence

from mpxla.errors import ScheduleError
from mpxla.schedule.action import Action, Op

__all__ = ["forward_only", "generate", "interleaved", "simple"]


def simple(
    num_microbatches: int, placement: Sequence[int], active_microbatches: int | None = None
) -> list[list[Action]]:
    """All forwards, then all backwards (fill and drain, as in GPipe).

    Args:
        num_microbatches: microbatches of a step.
        placement: pipeline rank of every stage.
        active_microbatches: most microbatches in flight; with fewer than `num_microbatches` the
            pipeline fills and drains in rounds of that many. None: one round.

    Returns:
        One list of actions per pipeline rank, up to the highest in `placement`.

    Raises:
        ScheduleError: a count below one, or an empty or negative placement.
    """
    round_size = num_microbatches if active_microbatches is None else active_microbatches
    _check(num_microbatches, placement, round_size)
    run = _ListSchedule(num_microbatches, placement)
    return run.all_actions(_Rounds(run, round_size).is_allowed)


def interleaved(
    num_microbatches: int, placement: Sequence[int], active_microbatches: int
) -> list[list[Action]]:
    """A ready backward before a pending forward; with one stage per rank, 1F1B.

    Stage `s` of `S` holds at most `min(active_microbatches, S - s)` microbatches between their
    forward and their backward: later stages see their backwards sooner, so that more would not
    make the pipeline faster when all stages are equal.

    Args:
        num_microbatches: microbatches of a step.
        placement: pipeline rank of every stage.
        active_microbatches: most microbatches in flight at a stage.

    Returns:
        One list of actions per pipeline rank, up to the highest in `placement`.

    Raises:
        ScheduleError: a count below one, or an empty or negative placement.
    """
    _check(num_microbatches, placement, active_microbatches)
    run = _ListSchedule(num_microbatches, placement)
    bounds = [min(active_microbatches, run.num_stages - s) for s in range(run.num_stages)]

    def is_allowed(stage: int, op: Op) -> bool:
        in_flight = run.num_forwards[stage] - run.num_backwards[stage]
        return op is Op.BACKWARD or in_flight < bounds[stage]

    return run.all_actions(is_allowed)


def forward_only(num_microbatches: int, placement: Sequence[int]) -> list[list[Action]]:
    """Forwards alone, for evaluation: nothing is kept, so nothing bounds what is in flight.

    Args:
        num_microbatches: microbatches of a step.
        placement: pipeline rank of every stage.

    Returns:
        One list of actions per pipeline rank, up to the highest in `placement`.

    Raises:
        ScheduleError: no microbatches, or an empty or negative placement.
    """
    _check(num_microbatches, placement, 1)
    return _ListSchedule(num_microbatches, placement, training=False).all_actions()


def generate(
    pipeline: str,
    num_microbatches: int,
    placement: Sequence[int],
    active_microbatches: int,
    training: bool,
) -> list[list[Action]]:
    """Generates the schedule that the configuration names.

    Args:
        pipeline: "interleaved" or "simple", the values of the key `pipeline`.
        num_microbatches: microbatches of a step.
        placement: pipeline rank of every stage.
        active_microbatches: most microbatches in flight.
        training: whether there are backwards; without them, every name means `forward_only`.

    Returns:
        One list of actions per pipeline rank, up to the highest in `placement`.

    Raises:
        ScheduleError: an unknown name, a count below one, or an empty or negative placement.
    """
    if pipeline not in _TRAINING:
        nearest = difflib.get_close_matches(str(pipeline), _TRAINING, n=1, cutoff=0.0)
        raise ScheduleError(
            f"pipeline: {pipeline!r} is not a schedule; the nearest is {nearest[0]!r}. "
            f"Use one of {', '.join(map(repr, sorted(_TRAINING)))}."
        )
    if not training:
        return forward_only(num_microbatches, placement)
    return _TRAINING[pipeline](num_microbatches, placement, active_microbatches)


_TRAINING: dict[str, Callable[[int, Sequence[int], int], list[list[Action]]]] = {
    "interleaved": interleaved,
    "simple": simple,
}


_TICKS = {Op.FORWARD: 1, Op.BACKWARD: 2}


class _ListSchedule:
    """A schedule in the making; stages take microbatches in order, so counters describe it.

    Attributes:
        num_microbatches: microbatches of the step.
        num_stages: stages of the pipeline.
        stages: stages of every rank.
        num_forwards: forwards that each stage has begun.
        num_backwards: backwards that each stage has begun.
    """

    def __init__(self, num_microbatches: int, placement: Sequence[int], training: bool = True):
        self.num_microbatches = num_microbatches
        self.num_stages = len(placement)
        self.stages: list[list[int]] = [[] for _ in range(max(placement) + 1)]
        for stage, rank in enumerate(placement):
            self.stages[rank].append(stage)
        self.num_forwards = [0] * self.num_stages
        self.num_backwards = [0] * self.num_stages
        self._training = training
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
        remaining = self.num_microbatches * self.num_stages * (2 if self._training else 1)
        tick = 0
        while remaining:
            for rank in [rank for rank, (end, _) in running.items() if end == tick]:
                self._finish(running.pop(rank)[1])
                remaining -= 1
            for rank, actions in enumerate(schedule):
                if rank in running or not (candidates := self._candidates(rank, is_allowed)):
                    continue
                _, microbatch, stage, op = min(candidates)
                counts = self.num_forwards if op is Op.FORWARD else self.num_backwards
                counts[stage] += 1
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
        elif stage > 0:
            self._arrived[Op.BACKWARD][stage - 1] += 1

    def _candidates(
        self, rank: int, is_allowed: Callable[[int, Op], bool]
    ) -> list[tuple[int, int, int, Op]]:
        """What a rank could do next, as (urgency, microbatch, stage, op); the least goes first."""
        found: list[tuple[int, int, int, Op]] = []
        arrived = self._arrived
        for stage in self.stages[rank]:
            forward, backward = self.num_forwards[stage], self.num_backwards[stage]
            if self._training and backward < arrived[Op.BACKWARD][stage]:
                if is_allowed(stage, Op.BACKWARD):
                    found.append((0, backward, stage, Op.BACKWARD))
            if forward < arrived[Op.FORWARD][stage] and is_allowed(stage, Op.FORWARD):
                found.append((1, forward, stage, Op.FORWARD))
        return found


class _Rounds:
    """The policy of `simple`: a rank ends each half of a round before it begins the next half."""

    def __init__(self, run: _ListSchedule, round_size: int):
        self._run = run
        self._round_size = round_size
        self._siblings: dict[int, list[int]] = {s: group for group in run.stages for s in group}

    def is_allowed(self, stage: int, op: Op) -> bool:
        """Whether the stage's next action of this kind belongs to its rank's current half round."""
        run, size = self._run, self._round_size
        siblings = self._siblings[stage]
        if op is Op.FORWARD:
            begun = run.num_forwards[stage] // size * size
            return all(run.num_backwards[sibling] >= begun for sibling in siblings)
        round_end = (run.num_backwards[stage] // size + 1) * size
        needed = min(round_end, run.num_microbatches)
        return all(run.num_forwards[sibling] >= needed for sibling in siblings)


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
