"""Gradients over replicas: packed as soon as they are complete, reduced in the background.

A bucket starts when the last stage that contributes to it has had its last backward; the others of
the pipeline may still be in their cool-down then. At the end of the step the results are unpacked
to `param.grad`.

    REDUCE of stage 1   start:   pack program -> transport (copies and sums in threads)
    REDUCE of stage 0   start:   ...
    after the actions   finish:  wait, add over the holders of tied parameters, unpack

Tied parameters are reduced over replicas first, by each pipeline rank that holds them, and added
over those ranks afterwards in one fixed order, so that all copies stay equal bit for bit.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from mpxla.comm.handle import Handle
from mpxla.errors import ConfigError, StepError
from mpxla.parallel.buckets import Bucket, Packer, fill_buckets, shared_names
from mpxla.parallel.comm_hook import CommHook
from mpxla.parallel.replica import Replica, equalize, store
from mpxla.parallel.zero import ShardedParameters
from mpxla.runtime.executor import StepRun
from mpxla.runtime.gradients import sum_over_holders
from mpxla.runtime.plan import CutStep
from mpxla.stage.device import make_ready, to_device
from mpxla.stage.spec import TensorSpec

__all__ = ["TRANSFER_DTYPES", "GradientReducer", "ReductionOptions"]

TRANSFER_DTYPES = {"same": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Value of the key `reduction_dtype` -> in what gradients travel; None for their own type."""


@dataclass(frozen=True)
class ReductionOptions:
    """What users choose.

    Attributes:
        bucket_cap_mb: largest bucket, in MiB.
        backward_passes_per_step: step calls whose gradients are summed before a reduction.
        is_averaged: whether gradients are the mean over microbatches (else the sum).
        is_overlapping: reduce a bucket once it is complete, or all at the end of the step.
        broadcasts_buffers: whether buffers follow the first replica after every training step.
        transfer_dtype: in which gradients travel; None for their own.
        is_sharded: whether replicas divide the updates; gradients go to the owners only then.
    """

    bucket_cap_mb: float = 25
    backward_passes_per_step: int = 1
    is_averaged: bool = True
    is_overlapping: bool = True
    broadcasts_buffers: bool = True
    transfer_dtype: torch.dtype | None = None
    is_sharded: bool = False

    @property
    def capacity_bytes(self) -> int:
        """Largest bucket."""
        return int(self.bucket_cap_mb * 2**20)


class GradientReducer:
    """Reduces the gradients of one rank's parameters over its data-parallel group.

    Args:
        replica: this rank among the replicas.
        options: what the user chose.
    """

    def __init__(self, replica: Replica, options: ReductionOptions):
        self.replica = replica
        self.options = options
        self.hook: CommHook | None = None
        self.shards: ShardedParameters | None = None
        self.parameter_ranks: Mapping[str, tuple[int, ...]] = {}
        self._is_prepared = False
        self._pass = 0

    def set_hook(self, state: Any, hook: Callable[[Any, Any], Any], has_ddp: bool) -> None:
        """Lets a user's function communicate; see `DistributedModel.register_comm_hook`."""
        problems = {
            "needs ddp: True": not has_ddp,
            "needs DistributedModel(overlapping_allreduce=True)": not self.options.is_overlapping,
            "decides itself how gradients travel; remove the key reduction_dtype": (
                self.options.transfer_dtype is not None
            ),
            "does not go with shard_optimizer_state: True": self.options.is_sharded,
            "was called a second time; a model has one hook": self.hook is not None,
            "was called after the first training step; register the hook before": (
                self._is_prepared
            ),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise ConfigError(f"model.register_comm_hook {problem}.")
        self.hook = CommHook(state, hook, self.replica.transport)

    def equalize(self, parameter_ranks: Mapping[str, tuple[int, ...]]) -> None:
        """Gives all replicas, and all holders of a shared parameter, the same start values."""
        self.parameter_ranks = parameter_ranks
        equalize(self.replica, 0, parameter_ranks)
        if self.options.is_sharded:
            capacity = self.options.capacity_bytes
            self.shards = ShardedParameters(self.replica, parameter_ranks, capacity)

    def objective_scale(self, num_microbatches: int) -> float:
        """1 / microbatches for the mean; comm hooks get sums and average by themselves."""
        return 1.0 / num_microbatches if self.options.is_averaged and self.hook is None else 1.0

    def prepare(self, cut: CutStep) -> "BucketedReduction":
        """Makes the reduction of a training step."""
        self._is_prepared = True
        return BucketedReduction(self, cut)

    def next_pass_reduces(self) -> bool:
        """Counts step calls; whether the one that begins is the last before an update."""
        if self.replica.count == 1:
            return True
        self._pass += 1
        return self._pass % self.options.backward_passes_per_step == 0

    @property
    def transfers(self) -> bool:
        """Whether gradients leave this rank at all."""
        return self.replica.count > 1 or self.hook is not None


class BucketedReduction:
    """The reduction of one training step; see `StepReduction`.

    Args:
        reducer: of this rank.
        cut: the step in stages.
    """

    def __init__(self, reducer: GradientReducer, cut: CutStep):
        self._reducer = reducer
        self._replica = reducer.replica
        self._shards = reducer.shards
        self._trained = frozenset(cut.trained_stages())
        self._sources = _sources_of(cut, self._replica.pp_rank)
        self._buckets = self._form_buckets(cut)
        self._packers = [self._make_packer(bucket) for bucket in self._buckets]
        bucketed = {name for bucket in self._buckets for name in bucket.names}
        self._direct = [name for name in self._sources if name not in bucketed]
        self._changed = sorted(
            {
                name
                for stage in cut.stages
                if cut.placement[stage.index] == self._replica.pp_rank
                for name in stage.new_buffers
            }
        )
        self._reduces = True
        self._waiting: dict[int, set[int]] = {}
        self._under_way: dict[int, Handle[torch.Tensor]] = {}

    # --- preparation ----------------------------------------------------------------------------

    def _form_buckets(self, cut: CutStep) -> list[Bucket]:
        """Buckets of what is reduced or shared, in the order in which they are complete."""
        if self._shards is not None:
            for name in self._sources:
                if name not in self._shards:
                    raise StepError(
                        f"the step trains the parameter {name}, which did not require a gradient "
                        f"when the model was partitioned. With shard_optimizer_state: True, set "
                        f"requires_grad before, and freeze parameters by giving them no gradient."
                    )
            return [b for b in self._shards.buckets if not self._trained.isdisjoint(b.names)]
        capacity = self._reducer.options.capacity_bytes
        parameters = self._replica.state.parameters
        shared = shared_names(cut, self._replica.pp_rank)
        is_shared = {name for names in shared.values() for name in names}
        groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
        if self._reducer.transfers:
            # Backwards come to the last stage first.
            for name, sources in sorted(self._sources.items(), key=lambda item: -item[1][0][0]):
                if name not in is_shared:
                    stages = tuple(stage for stage, _ in sources)
                    groups.setdefault((stages, (self._replica.pp_rank,)), []).append(name)
        for holders, names in sorted(shared.items()):
            groups[(), holders] = names
        buckets: list[Bucket] = []
        for (_, holders), names in groups.items():
            specs = {name: TensorSpec.of(parameters[name]) for name in names}
            buckets += fill_buckets(specs, holders, capacity)
        return buckets

    def _make_packer(self, bucket: Bucket) -> Packer | None:
        present = self._present(bucket)
        dtype = self._reducer.options.transfer_dtype if self._replica.count > 1 else None
        dtype = dtype or bucket.dtype
        shape = (-1,) if self._shards is None else (bucket.parts, -1)
        return Packer(bucket, present, dtype, self._replica.device, shape) if present else None

    def _present(self, bucket: Bucket) -> list[str]:
        return [name for name in bucket.names if name in self._sources]

    # --- every call -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Counts the pass."""
        self._reduces = self._reducer.next_pass_reduces()
        self._under_way.clear()
        self._waiting = {
            index: {stage for name in self._present(bucket) for stage, _ in self._sources[name]}
            for index, bucket in enumerate(self._buckets)
        }

    def start(self, stage: int, run: StepRun) -> None:
        """Starts the buckets that were waiting for this stage."""
        if not (self._reduces and self._reducer.options.is_overlapping):
            return
        for index, stages in self._waiting.items():
            if stage in stages:
                stages.remove(stage)
                if not stages:
                    self._launch(index, run)

    def finish(self, run: StepRun) -> None:
        """Leaves all gradients on `param.grad`, and the first replica's buffers everywhere."""
        if not self._reduces:
            self._accumulate((name, self._gradient(name, run)) for name in self._sources)
            return
        for index in range(len(self._buckets)):
            if index not in self._under_way:
                self._launch(index, run)
        buffers = self._start_buffers()
        direct = [(name, self._gradient(name, run)) for name in self._direct]
        self._accumulate(direct, is_total=True)
        # In the order of the list, which pipeline ranks have in common for what they share.
        for index, bucket in enumerate(self._buckets):
            flat = self._under_way[index].result().to(bucket.dtype)
            if len(bucket.holders) > 1:
                replica = self._replica
                flat = sum_over_holders(flat, bucket.holders, replica.pp_rank, replica.link)
            if self._shards is not None:
                self._shards.receive_gradients(bucket, flat, self._trained)
                continue
            views = bucket.split(flat)
            arrived = to_device(list(views.values()), self._replica.device)
            self._accumulate(zip(views, arrived, strict=True), is_total=True)
        self._under_way.clear()
        for name, handle in buffers.items():
            store(self._replica, [name], to_device([handle.result()], self._replica.device))

    def _launch(self, index: int, run: StepRun) -> None:
        bucket, packer, hook = self._buckets[index], self._packers[index], self._reducer.hook
        present = self._present(bucket)
        scale = 1.0 if hook is not None else 1.0 / self._replica.count
        if packer is None:
            flat = torch.zeros(bucket.num_elements, dtype=bucket.dtype)
        else:
            flat = packer([self._gradient(name, run, earlier=True) for name in present], scale)
        if self._shards is not None:
            flat = flat.view(bucket.parts, -1) if packer is None else flat
            for name in present:
                self._replica.state.parameters[name].grad = None
        if hook is not None:
            parameters = [self._replica.state.parameters[name] for name in bucket.names]
            is_last = len(self._under_way) == len(self._buckets) - 1
            number = len(self._under_way)
            self._under_way[index] = hook.submit(bucket, flat, number, is_last, parameters)
        elif self._shards is not None:
            transport = self._replica.transport
            self._under_way[index] = transport.reduce_scatter(flat, self._replica.group)
        elif self._replica.count > 1:
            self._under_way[index] = self._replica.transport.all_reduce(flat, self._replica.group)
        else:
            self._under_way[index] = _done(self._replica, flat)

    def _gradient(self, name: str, run: StepRun, earlier: bool = False) -> torch.Tensor:
        """Sum over this rank's stages, and over earlier passes that were not reduced."""
        terms = [run.accumulators[stage][place] for stage, place in self._sources[name]]
        before = self._replica.state.parameters[name].grad
        if earlier and self._accumulates_locally and before is not None:
            terms.insert(0, before)
        if len(terms) == 1:
            return terms[0]
        total = reduce(torch.add, terms)
        make_ready([total])
        return total

    @property
    def _accumulates_locally(self) -> bool:
        """Whether `param.grad` holds earlier passes of this replica alone."""
        return self._replica.count > 1 and self._reducer.options.backward_passes_per_step > 1

    def _accumulate(
        self, gradients: Iterable[tuple[str, torch.Tensor]], is_total: bool = False
    ) -> None:
        """Adds to `param.grad`; totals of several passes already hold what is there."""
        changed: list[torch.Tensor] = []
        for name, value in gradients:
            parameter = self._replica.state.parameters[name]
            if parameter.grad is None or (is_total and self._accumulates_locally):
                parameter.grad = value
            else:
                parameter.grad = parameter.grad + value
            changed.append(parameter.grad)
        make_ready(changed)

    def _start_buffers(self) -> dict[str, Handle[torch.Tensor]]:
        replica = self._replica
        if replica.count == 1 or not self._reducer.options.broadcasts_buffers:
            return {}
        buffers = replica.state.buffers
        source = replica.group[0]
        return {
            name: replica.transport.broadcast(buffers[name], source, replica.group)
            for name in self._changed
        }


def _sources_of(cut: CutStep, pp_rank: int) -> dict[str, list[tuple[int, int]]]:
    """Where this rank's gradients are: name -> (stage, place among its accumulators)."""
    sources: dict[str, list[tuple[int, int]]] = {}
    for stage in cut.stages:
        if cut.placement[stage.index] == pp_rank:
            for place, name in enumerate(stage.trained):
                sources.setdefault(name, []).append((stage.index, place))
    return sources


def _done(replica: Replica, value: torch.Tensor) -> Handle[torch.Tensor]:
    handle: Handle[torch.Tensor] = Handle(replica.transport.watch, "nothing")
    handle.set_result(value)
    return handle
