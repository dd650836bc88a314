"""The reduction of a step that trains several models: each has its reducer, replicas meet once.

begin    every model counts its pass; replicas meet if any of them reduces
start    the models' buckets that were waiting for a stage, in the order of the models
finish   model after model
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from mpxla.errors import StepError
from mpxla.parallel.bucketed import BucketedReduction, GradientFlow
from mpxla.parallel.reducer import GradientReducer
from mpxla.parallel.rounds import Rounds
from mpxla.runtime.cut import CutStep

__all__ = ["CombinedReduction", "ModelReducers"]


class CombinedReduction:
    """The reduction of one training step; see `runtime.reduction.StepReduction`.

    The objective's scale is its gradient in every microbatch, before the models' loss scales.
    """

    def __init__(
        self,
        rounds: Rounds,
        parts: Sequence[BucketedReduction],
        objective_scale: float = 1.0,
        loss_scales: Sequence[Callable[[], float]] = (),
    ):
        self._rounds = rounds
        self._parts = tuple(parts)
        self._objective_scale = objective_scale
        self._loss_scales = tuple(loss_scales)

    @property
    def objective_scale(self) -> float:
        """What the gradient of every microbatch's objective is; changes with the loss scale.

        Raises:
            StepError: the models of the step have different loss scales.
        """
        scales = {scale() for scale in self._loss_scales}
        if len(scales) > 1:
            raise StepError(
                f"the models that are trained in one step have different loss scales "
                f"({sorted(scales)}). Train them in steps of their own, or give their optimizers "
                f"equal static scales."
            )
        return self._objective_scale * (scales.pop() if scales else 1.0)

    def begin(self) -> None:
        """Counts passes, and agrees with the other replicas."""
        reducing = [part for part in self._parts if part.begin()]
        if not reducing:
            return
        source = self._rounds.meet(
            " ".join(part.description for part in reducing),
            "; ".join(part.settings() for part in reducing),
            lambda: [collective for part in reducing for collective in part.outline()],
        )
        for part in reducing:
            part.source = source

    def start(self, stage: int, gradients: Mapping[int, list[torch.Tensor]]) -> None:
        """Starts the buckets that were waiting for a stage."""
        if self._rounds.is_uneven and len(self._parts) > 1:
            return  # replicas without a batch go through the outline, model after model
        for part in self._parts:
            part.start(stage, gradients)

    def finish(self, gradients: Mapping[int, list[torch.Tensor]]) -> None:
        """Leaves all gradients on `param.grad`, and the first replica's buffers everywhere."""
        for part in self._parts:
            part.finish(gradients)


class ModelReducers:
    """What the engine is given; see `runtime.reduction.Reducers`."""

    def __init__(self, rounds: Rounds):
        self._rounds = rounds
        self._reducers: dict[str, GradientReducer] = {}

    def add(self, reducer: GradientReducer) -> None:
        """Takes in a model."""
        self._reducers[reducer.label] = reducer

    def __iter__(self) -> Iterator[GradientReducer]:
        return iter(self._reducers.values())

    def equalize(
        self, label: str, parameter_ranks: Mapping[str, tuple[int, ...]], names: Sequence[str]
    ) -> None:
        """Gives all replicas, and all holders of a shared parameter, the same start values."""
        self._reducers[label].equalize(parameter_ranks, names)

    def meet(self, what: str, line: str) -> None:
        """Before something that all replicas do at once, or none."""
        self._rounds.attendance.meet(what, line)

    def prepare(self, cuts: Sequence[CutStep], num_microbatches: int) -> CombinedReduction:
        """Makes the reduction of a training step, of the models that it trains or changes."""
        changed = {name for cut in cuts for stage in cut.stages for name in stage.new_buffers}
        flows: list[tuple[GradientReducer, GradientFlow]] = []
        for reducer in self:
            pp_rank, ranks = reducer.replica.pp_rank, reducer.replica.store.ranks
            flow = GradientFlow.of(cuts, pp_rank, ranks, reducer.names)
            reducer.prepare_updates(flow.trained)  # also what was frozen when it was placed
            if flow.trained or not changed.isdisjoint(reducer.names):
                flows.append((reducer, flow))
        scales = {r.objective_scale(num_microbatches) for r, flow in flows if flow.trained}
        objective_scale = max(scales, default=1.0)
        parts: list[BucketedReduction] = []
        for reducer, flow in flows:
            reducer.is_prepared = True
            own = reducer.objective_scale(num_microbatches) if flow.trained else objective_scale
            parts.append(BucketedReduction(reducer, flow, own / objective_scale))
        loss_scales = [reducer.loss_scale for reducer, flow in flows if flow.trained]
        return CombinedReduction(self._rounds, parts, objective_scale, loss_scales)
