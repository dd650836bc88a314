"""The search of `python -m mpxla plan`: cuts, schedules and recomputation together.

phase 1, list:   weights of memory for the cut x schedules x microbatches in flight x how much
                 stages keep for their backwards.
phase 2, rough:  simulate all of them, with one cut for every placement of stages.
phase 3, exact:  cut and lower the best few by their own microbatches in flight. What does not
                 fit so gets `activation_memory`: what parameters leave on the fullest rank.
"""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

from mpxla.config import Config
from mpxla.device.backend import Lowering
from mpxla.errors import ConfigError, ScheduleError
from mpxla.graph.cost import MachineModel
from mpxla.graph.partition.report import format_size
from mpxla.graph.stepgraph import StepGraph
from mpxla.runtime.plans.automatic import WEIGHTS
from mpxla.runtime.plans.cut import CutStep, cut_step
from mpxla.runtime.plans.forecast import Forecast, forecast, predict_costs
from mpxla.runtime.saved import saved_tensors
from mpxla.schedule.choice import placement_of
from mpxla.schedule.search import Candidate, Found, StepCosts, candidates, search
from mpxla.tables import table

__all__ = ["PlanSearch", "Row", "describe_rows", "schedules_to_try"]

_SHARES = (1.0, 0.5, 0.0)
"""Of what is dear to compute again, kept under a limit of memory."""
_EXACTLY = 8
"""How many are cut and lowered for themselves."""


@dataclass(frozen=True)
class Row:
    """A candidate that was planned for itself."""

    config: Config
    found: Forecast

    @property
    def order(self) -> tuple[float, int]:
        """The fastest first, of equally fast ones the smallest."""
        return self.found.timeline.makespan, max(self.found.rank_bytes)


class PlanSearch:
    """Finds the best candidates.

    Args:
        config: degrees, microbatches and offloading; what a candidate does not say.
        step: the captured step.
        machine: rates of the target.
        lowering: what the backend wants.
        limit_bytes: most bytes of any rank; None: no limit.
    """

    def __init__(
        self,
        config: Config,
        step: StepGraph,
        machine: MachineModel,
        lowering: Lowering,
        limit_bytes: int | None,
    ):
        self._config, self._step, self._limit = config, step, limit_bytes
        self._machine, self._lowering = machine, lowering
        self._saved = saved_tensors(step, lowering)
        self._is_free = config.activation_memory == "keep" and limit_bytes is not None

    def best(self, tried: list[Candidate], has_weight: bool) -> list[Row]:
        """What fits of some schedules, which keep everything, the fastest first.

        `has_weight` says whether the configuration's `memory_weight` is to be kept.

        Raises:
            ScheduleError: nothing fits.
        """
        weights = (self._config.memory_weight,) if has_weight else WEIGHTS
        rough: list[tuple[Found, float]] = []
        nothing: ScheduleError | None = None
        for weight in weights:
            try:
                rough += [(found, weight) for found in self._roughly(tried, weight)]
            except ScheduleError as error:
                nothing = error
        rough.sort(key=lambda entry: (entry[0].step_s, max(entry[0].rank_bytes)))
        best: dict[tuple[Candidate, float], None] = {}
        seen: set[tuple[float, tuple[int, ...]]] = set()
        for found, weight in rough:
            figures = found.step_s, found.rank_bytes
            if figures not in seen:  # limits that nothing reaches are alike
                seen.add(figures)
                best[replace(found.candidate, share=1.0), weight] = None
        planned = [self._exactly(*entry) for entry in list(best)[:_EXACTLY]]
        rows = [row for row in planned if row is not None]
        if not rows:
            raise nothing or ScheduleError(
                f"No schedule fits into {self._limit} bytes per rank. Use more ranks, smaller "
                f"microbatches, or a higher limit."
            )
        return sorted(rows, key=lambda row: row.order)

    def _roughly(self, tried: list[Candidate], weight: float) -> list[Found]:
        """Simulates candidates; what is computed again takes time, so only under a limit."""
        own = 0.0 if self._config.activation_memory == "recompute" else 1.0
        shares = _SHARES if self._is_free else (own,)
        known: dict[tuple[int, ...], dict[float, StepCosts]] = {}

        def costs_of(candidate: Candidate) -> StepCosts:
            config = self._config_of(candidate, weight)
            kind = placement_of(config)
            if kind not in known:
                cut = self._cut(config)
                costs = predict_costs(cut, self._machine, self._lowering, shares)
                known[kind] = dict(zip(shares, costs, strict=True))
            return known[kind][candidate.share]

        every = [replace(candidate, share=share) for candidate in tried for share in shares]
        offloads = self._config.offload_activations
        horizon = self._config.activation_loading_horizon if offloads else None
        ranks = self._config.pipeline_parallel_degree
        return search(ranks, every, costs_of, self._limit, horizon)

    def _exactly(self, candidate: Candidate, weight: float) -> Row | None:
        """Plans a candidate; None if it does not fit."""
        limit = self._limit
        row = self._planned(self._config_of(candidate, weight))
        if limit is None or max(row.found.rank_bytes) <= limit:
            return row
        left = limit - max(row.found.costs.fixed_bytes)
        if self._is_free and left > 0:
            with contextlib.suppress(ConfigError):  # no stage can do with so little
                return self._planned(self._config_of(candidate, weight, left))
        return None

    def _cut(self, config: Config) -> CutStep:
        saved, machine = self._saved, self._machine
        return cut_step(self._step, config, self._lowering, {}, None, saved=saved, machine=machine)

    def _planned(self, config: Config) -> Row:
        cut = self._cut(config)
        return Row(config, forecast(cut, config, self._machine, self._lowering))

    def _config_of(
        self, candidate: Candidate, weight: float, memory: str | int | None = None
    ) -> Config:
        return replace(
            self._config,
            microbatches=candidate.num_microbatches,
            pipeline=candidate.pipeline,
            virtual_pipeline_degree=candidate.stages_per_rank,
            active_microbatches=candidate.active_microbatches,
            memory_weight=weight,
            activation_memory=memory or self._config.activation_memory,
        )


def schedules_to_try(
    config: Config, pipeline: str | None, stages_per_rank: int | None, active: int | None
) -> list[Candidate]:
    """All sensible schedules with the parts that are given."""
    given: dict[str, Any] = {"pipelines": (pipeline,)} if pipeline else {}
    given |= {"stages_per_rank": (stages_per_rank,)} if stages_per_rank else {}
    found = candidates(config.pipeline_parallel_degree, [config.microbatches], **given)
    if active is not None:
        found = [replace(candidate, active_microbatches=active) for candidate in found]
    return list(dict.fromkeys(found))


def describe_rows(rows: list[Row], num_tried: int) -> str:
    """A table of what was planned."""
    title = "step, ms", "bubble, %", "fullest rank", "activations", "kept", "memory_weight"
    lines: list[tuple[str, ...]] = [(*title, "schedule")]
    for row in rows:
        found, config = row.found, row.config
        kept = config.activation_memory
        lines.append(
            (
                f"{1e3 * found.timeline.makespan:.3g}",
                f"{100 * found.timeline.bubble:.1f}",
                format_size(max(found.rank_bytes)),
                format_size(max(found.activation_bytes)),
                format_size(kept) if isinstance(kept, int) else kept,
                f"{config.memory_weight:g}",
                f"{config.pipeline}, {config.virtual_pipeline_degree} per rank, "
                f"{config.active_microbatches} active",
            )
        )
    return "\n".join([f"Best of {num_tried} schedules:", *table(lines)])
