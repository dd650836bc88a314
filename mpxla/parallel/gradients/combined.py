"""The reduction of a step that trains several models: each has its reducer, replicas meet once.

begin    every model counts its pass; replicas meet if any of them reduces
start    the models' buckets that were waiting for a stage, in the order of the models
finish   model after model
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from mpxla.errors import ConfigError, RankMismatch, StepError
from mpxla.log import warn_once
from mpxla.parallel.gradients.bucketed import BucketedReduction, GradientFlow, Reduced
from mpxla.parallel.gradients.reducer import GradientReducer
from mpxla.parallel.gradients.rounds import Rounds
from mpxla.runtime.plans.cut import CutStep

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
        exchanges: Sequence[str] = (),
        reducers: Sequence[GradientReducer] = (),
    ):
        self._rounds = rounds
        self._parts = tuple(parts)
        self._objective_scale = objective_scale
        self._loss_scales = tuple(loss_scales)
        self._exchanges = " ".join(exchanges)
        self._reducers = tuple(reducers)
        self._reducing: list[BucketedReduction] = []

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
        self._reducing = reducing = [part for part in self._parts if part.begin()]
        if not reducing:
            return
        drifted = [sorted(reducer.drifted) for reducer in self._reducers]
        source = self._rounds.begin_step(
            " ".join(part.description for part in reducing),
            "; ".join(part.reducer.settings() for part in reducing),
            self._exchanges,
            lambda: [collective for part in reducing for collective in part.outline()],
            str(drifted) if any(drifted) else "",
        )
        for part in reducing:
            part.source = source
        # What evaluations have written follows before the step reads it, where all wrote the same.
        # Who wrote nothing does not wait here; `finish` sees to the rest.
        if any(drifted) and not self._rounds.is_uneven and self._rounds.have_drifted_alike():
            self._follow_first(drifted)

    def start(self, stage: int, gradients: Mapping[int, list[torch.Tensor]]) -> None:
        """Starts the buckets that were waiting for a stage.

        None of them starts where replicas do not reduce the same; `finish` sees to that.
        """
        if self._rounds.is_uneven and len(self._parts) > 1:
            return  # replicas without a batch go through the outline, model after model
        ready = [(part, index) for part in self._parts for index in part.complete(stage)]
        if ready and self._rounds.is_same():
            for part, index in ready:
                part.launch(index, gradients)

    def finish(self, gradients: Mapping[int, list[torch.Tensor]]) -> None:
        """Leaves all gradients on `param.grad`, and the first replica's buffers everywhere.

        Raises:
            RankMismatch: replicas do not reduce the same, and cannot reduce what any of them does.
        """
        parts = self._parts
        if self._reducing and not self._rounds.is_same():
            parts = self.joined()
        for part in parts:
            part.finish(gradients)
        if self._reducing and not self._rounds.have_drifted_alike():
            everyone = self._rounds.gather([sorted(reducer.drifted) for reducer in self._reducers])
            self._follow_first(
                [sorted({*itertools.chain(*them)}) for them in zip(*everyone, strict=True)]
            )

    def _follow_first(self, drifted: Sequence[Sequence[str]]) -> None:
        for reducer, names in zip(self._reducers, drifted, strict=True):
            reducer.follow_first(names)

    def joined(self) -> tuple[BucketedReduction, ...]:
        """The parts of a step in which replicas train different parameters; all call it.

        Raises:
            RankMismatch: there is no such step.
        """
        everyone: list[list[Reduced]] = self._rounds.gather([p.what() for p in self._reducing])
        if len({len(found) for found in everyone}) > 1:
            raise RankMismatch(
                "the step trains more models on one replica than on another. Call the same step "
                "functions on all replicas."
            )
        warn_once(
            "replicas that differ",
            "replicas train different parameters in a step: where one does not train what another "
            "does, its gradient counts as zero (as with find_unused_parameters=True of "
            "DistributedDataParallel), and gradients are averaged at the end of such steps only.",
        )
        by_part = zip(*everyone, strict=True)
        joined = [p.joined(them) for p, them in zip(self._reducing, by_part, strict=True)]
        instead = dict(zip(map(id, self._reducing), joined, strict=True))
        return tuple(instead.get(id(part), part) for part in self._parts)


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
        self._rounds.meet(what, line)

    def note_written(self, names: Sequence[str]) -> None:
        """Notes what an evaluation has written."""
        for reducer in self:
            reducer.note_written(names)

    def prepare(
        self, cuts: Sequence[CutStep], num_microbatches: int, exchanges: Sequence[str]
    ) -> CombinedReduction:
        """Makes the reduction of a training step, of the models that it trains or changes."""
        changed = {name for cut in cuts for stage in cut.stages for name in stage.new_buffers}
        flows: list[tuple[GradientReducer, GradientFlow]] = []
        for reducer in self:
            pp_rank, ranks = reducer.replica.pp_rank, reducer.replica.store.ranks
            flow = GradientFlow.of(cuts, pp_rank, ranks, reducer.names)
            reducer.prepare_updates(flow.trained)  # also what was frozen when it was placed
            if flow.trained or not changed.isdisjoint(reducer.names):
                flows.append((reducer, flow))
        for name in (name for cut in cuts for name, _ in cut.step.accumulated):
            for reducer, flow in flows:
                if reducer.names.get(name) in flow.trained:
                    _check_whole(name, reducer)
        scales = {r.objective_scale(num_microbatches) for r, flow in flows if flow.trained}
        objective_scale = max(scales, default=1.0)
        parts: list[BucketedReduction] = []
        for reducer, flow in flows:
            reducer.is_prepared = True
            own = reducer.objective_scale(num_microbatches) if flow.trained else objective_scale
            parts.append(BucketedReduction(reducer, flow, own / objective_scale))
        loss_scales = [reducer.loss_scale for reducer, flow in flows if flow.trained]
        return CombinedReduction(
            self._rounds, parts, objective_scale, loss_scales, exchanges, list(self)
        )


def _check_whole(name: str, reducer: GradientReducer) -> None:
    """Checks that a step call leaves the gradient of a parameter, whose hooks want it, on itself.

    Raises:
        ConfigError: it is on a master, divided, or that of one replica.
    """
    replica, own = reducer.replica, reducer.names[name]
    problem = None
    if (
        own in replica.state.gradient_shards
        or replica.store.owner(own) is not (replica.state.parameters[own])
    ):
        problem = "its gradient is on a master or divided over ranks"
    elif reducer.options.backward_passes_per_step > 1 < replica.count:
        problem = "with backward_passes_per_step > 1 its gradient is that of one replica"
    if problem is not None:
        raise ConfigError(
            f"parameter {name} has a hook by register_post_accumulate_grad_hook, and {problem} "
            f"after a step call. Do what the hook does between the last step call and "
            f"optimizer.step(), with what optimizer.param_groups holds."
        )
