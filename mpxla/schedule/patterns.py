"""Orders that are known to be best, written down by their arithmetic.

Each function gives the forwards and backwards of every rank for stages of equal cost. `p` is the
number of ranks, `m` of microbatches, `v` of stages per rank; F, I and W take one unit, B two.

    looped_1f1b     warm up, alternate one F and one B, drain, where the stages of a rank take turns
                    in groups of p microbatches. The bubble shrinks to (p - 1) / (m v + p - 1)
                    where messages do not hold ranks; under rendezvous it is larger.
    zero_bubble_h1  1F1B whose weight gradients wait: rank r keeps r of them back and fills its
                    drain with them. The bubble is (p - 1) / (3 m + p - 1), about a third of 1F1B's
                    3 (p - 1) / (3 m + 3 (p - 1)), with the same peak of p microbatches on rank 0.
    zero_bubble_v   on a V of 2 p stages: fill rank r with 2 (p - r) - 1 microbatches of its first
                    stage, bring in its second stage, then F I W of both in turn. From its first to
                    its last action no rank waits, and none holds more than 2 p microbatches of a
                    stage (half a rank's work each), as many as the first rank of 1F1B.

Sources: Narayanan et al., SC 2021 (section 2.2); Qi et al., ICLR 2024 (section 2, ZB-H1); Qi et
al., NeurIPS 2024 (section 4, V-Schedule zero bubble). This module must not know limits on
activations: its callers count what a pattern holds.
"""

from collections import Counter

from mpxla.schedule.action import Action, Op

__all__ = ["looped_1f1b", "zero_bubble_h1", "zero_bubble_v"]

Lists = list[list[Action]]


class _Line:
    """One rank's list in the making: every stage takes its microbatches in order."""

    def __init__(self, num_microbatches: int):
        self.actions: list[Action] = []
        self.num_microbatches = num_microbatches
        self.done: Counter[tuple[int, Op]] = Counter()

    def left(self, stage: int, op: Op) -> int:
        """How many microbatches the stage has not taken yet."""
        return self.num_microbatches - self.done[stage, op]

    def take(self, *todo: tuple[int, Op]) -> None:
        """The next microbatch of each (stage, op) in turn, where there is one left."""
        for stage, op in todo:
            if self.left(stage, op):
                self.actions.append(Action(stage, op, self.done[stage, op]))
                self.done[stage, op] += 1


def zero_bubble_h1(num_microbatches: int, num_ranks: int, active_microbatches: int) -> Lists:
    """ZB-H1 on one stage per rank, with a limit of microbatches between their F and their W."""
    schedule: Lists = []
    for rank in range(num_ranks):
        line = _Line(num_microbatches)
        forward, inputs, weights = (
            (rank, op) for op in (Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)
        )
        warm_up = min(num_ranks - rank, active_microbatches)
        kept_back = min(rank, active_microbatches - warm_up)
        line.take(*[forward] * (warm_up - 1))
        while line.left(*inputs):
            line.take(forward, inputs)
            if line.done[inputs] - line.done[weights] > kept_back:
                line.take(weights)
        line.take(*[weights] * line.left(*weights))
        schedule.append(line.actions)
    return schedule


def zero_bubble_v(num_microbatches: int, num_ranks: int) -> Lists:
    """The zero-bubble schedule on a V of stages s and 2 p - 1 - s on rank s; m is at least 2 p."""
    schedule: Lists = []
    for rank in range(num_ranks):
        line = _Line(num_microbatches)
        there, back = (
            [(stage, op) for op in (Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)]
            for stage in (rank, 2 * num_ranks - 1 - rank)
        )
        line.take(*[there[0]] * (2 * (num_ranks - rank) - 1))
        line.take(*[back[0], there[0]] * rank)
        line.take(*back * (num_ranks - rank))
        while line.left(*back[0]):
            line.take(*there, *back)
        line.take(*[there[1], back[1]] * rank)
        line.take(*[there[1], there[2]] * (num_ranks - rank))
        line.take(*[back[2]] * line.left(*back[2]))
        line.take(*[there[2]] * line.left(*there[2]))
        schedule.append(line.actions)
    return schedule


def looped_1f1b(num_microbatches: int, num_ranks: int, stages_per_rank: int) -> Lists:
    """1F1B over looped stages, s on rank s modulo p; m is a multiple of p, and v at least 2."""
    schedule: Lists = []
    for rank in range(num_ranks):
        stages = [rank + lap * num_ranks for lap in range(stages_per_rank)]
        rounds = range(num_microbatches // num_ranks)
        forwards = [(s, Op.FORWARD) for _ in rounds for s in stages for _ in range(num_ranks)]
        backwards = [
            (s, Op.BACKWARD) for _ in rounds for s in reversed(stages) for _ in range(num_ranks)
        ]
        warm_up = 2 * (num_ranks - 1 - rank) + (stages_per_rank - 1) * num_ranks
        warm_up = min(warm_up, len(forwards))
        line = _Line(num_microbatches)
        line.take(*forwards[:warm_up])
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            line.take(forward, backward)
        line.take(*backwards[len(forwards) - warm_up :])
        schedule.append(line.actions)
    return schedule
