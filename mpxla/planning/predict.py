"""The step of a layout: its schedule, simulated.

Long steps are not simulated in full. A schedule repeats itself after as many microbatches as
there are pipeline ranks, so that two short steps tell what each further round takes and keeps;
where stages are unequal, no less than the work of the busiest rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mpxla.errors import ConfigError
from mpxla.planning.layout import PRECISIONS, Layout, problems
from mpxla.planning.work import Work, step_costs
from mpxla.schedule.action import Op
from mpxla.schedule.analysis import peak_bytes
from mpxla.schedule.search import Found, StepCosts, compute_lists, search

__all__ = ["Prediction", "memory_of", "predict", "shortest_s", "simulated"]

_SPLITTING = ("zero_bubble", "zero_bubble_v")
_ROUNDS = 2
"""Rounds of microbatches until a schedule is in its steady state."""


@dataclass(frozen=True)
class Prediction:
    """A step on paper.

    Attributes:
        layout: how it is spread.
        num_microbatches: of every replica.
        step_s: seconds per step.
        bubble: share of the step in which devices run no program; the exchange counts as none.
        rank_bytes: memory of a device of every pipeline rank.
        fixed_bytes: of these, parameters, optimizer state and working memory.
        sequences_per_s: global batch per second.
        flops_per_s: operations of the model per second and device, nothing counted twice.
        peak_share: these as a share of the peak ("MFU").
    """

    layout: Layout
    num_microbatches: int
    step_s: float
    bubble: float
    rank_bytes: tuple[int, ...]
    fixed_bytes: tuple[int, ...]
    sequences_per_s: float
    flops_per_s: float
    peak_share: float

    @property
    def fullest(self) -> int:
        """The pipeline rank with most memory."""
        return self.rank_bytes.index(max(self.rank_bytes))


def predict(work: Work, costs: StepCosts | None = None) -> Prediction:
    """Predicts a step.

    Raises:
        ConfigError: the model cannot be spread like that.
        ScheduleError: there is no such schedule.
    """
    model, layout = work.model, work.layout
    wrong = problems(layout, model)
    if wrong:
        raise ConfigError(f"{model.name} as {layout} is impossible: {'; '.join(wrong)}.")
    costs = step_costs(work) if costs is None else costs
    num_microbatches = layout.num_microbatches(model)
    found = simulated(layout, num_microbatches, costs)
    flops = model.flops_per_token * model.sequence_length * model.global_batch
    flops_per_s = flops / found.step_s / layout.devices
    peak = work.device.peak_flops_per_s[PRECISIONS[layout.precision].dtype]
    return Prediction(
        layout,
        num_microbatches,
        found.step_s,
        found.bubble,
        found.rank_bytes,
        tuple(costs.fixed_bytes),
        model.global_batch / found.step_s,
        flops_per_s,
        flops_per_s / peak,
    )


def simulated(layout: Layout, num_microbatches: int, costs: StepCosts) -> Found:
    """The timeline's figures for any number of microbatches, which each have these costs."""

    def figures(count: int) -> list[float]:
        found = search(layout.stages, [layout.candidate(count)], lambda _: costs)[0]
        return [found.step_s, (1 - found.bubble) * found.step_s, *found.rank_bytes]

    step_s, busy_s, *sizes = _extended(layout, num_microbatches, figures)
    step_s = max(step_s, shortest_s(layout, num_microbatches, costs))
    candidate = layout.candidate(num_microbatches)
    return Found(candidate, step_s, 1 - busy_s / step_s, tuple(map(round, sizes)))


def memory_of(layout: Layout, num_microbatches: int, costs: StepCosts) -> tuple[int, ...]:
    """Bytes of every rank; no clock is needed, which makes it cheaper than `simulated`."""

    def figures(count: int) -> list[float]:
        lists = compute_lists(layout.stages, layout.candidate(count))
        peaks = peak_bytes(lists, costs.held)
        return [a + b for a, b in zip(peaks, costs.fixed_bytes, strict=True)]

    return tuple(map(round, _extended(layout, num_microbatches, figures)))


def _extended(
    layout: Layout, num_microbatches: int, figures: Callable[[int], list[float]]
) -> list[float]:
    """Figures of a step that may be too long to look at, from two that are not."""
    ranks = layout.stages
    short = num_microbatches % ranks + _ROUNDS * ranks
    is_irregular = layout.stages_per_rank > 1 and num_microbatches % ranks
    if is_irregular or num_microbatches <= short + ranks:
        return figures(num_microbatches)
    rounds = (num_microbatches - short) // ranks
    pairs = zip(figures(short), figures(short + ranks), strict=True)
    return [before + rounds * (after - before) for before, after in pairs]


def shortest_s(layout: Layout, num_microbatches: int, costs: StepCosts) -> float:
    """A time that no schedule of these stages can beat: every rank by itself, without messages.

    A rank waits for its first microbatch and runs all its programs; unless backwards are split, the
    last one must then go through all stages before.
    """
    placement = layout.placement
    times = costs.costs.per_stage(len(placement))
    forward, backward, reduce = times[Op.FORWARD], times[Op.BACKWARD], times[Op.REDUCE]
    bounds: list[float] = []
    for rank in range(layout.stages):
        own = [stage for stage, home in enumerate(placement) if home == rank]
        first = min(own)
        drain_s = 0.0 if layout.pipeline in _SPLITTING else sum(backward[:first])
        compute_s = num_microbatches * sum(forward[s] + backward[s] for s in own)
        after_s = max(drain_s, sum(reduce[s] for s in own) if layout.stages_per_rank == 1 else 0.0)
        bounds.append(sum(forward[:first]) + compute_s + after_s)
    return max(bounds)
