"""One plan, ready to run again and again: uploads, actions, results, gradients.

Everything that does not change between calls is made once, when the plan is new.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mpxla.comm.objects import Objects
from mpxla.comm.stall import Progress
from mpxla.comm.transport import Group, Members
from mpxla.device.backend import Backend, Buffer
from mpxla.runtime.constants import Constants
from mpxla.runtime.exchange import Result, exchange_results
from mpxla.runtime.executor import Executor, StepRun
from mpxla.runtime.index_checks import IndexChecks
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.outside import OutsideChanges
from mpxla.runtime.plans.plan import StepPlan
from mpxla.runtime.reduction import Gradients, StepReduction
from mpxla.runtime.states import ModelStates
from mpxla.runtime.step_writes import StepWrites, copy_held
from mpxla.runtime.valueless import Valueless
from mpxla.runtime.watching.debug import problem_of_checks, show_prints
from mpxla.runtime.watching.recorder import Recorder
from mpxla.schedule.lower import actions_of
from mpxla.stage.flat import FlatShard

__all__ = ["Gathering", "PlanRunner", "Ran"]

_NUM_SCHEDULES = 32
"""So many schedules of some of the microbatches are kept."""


@dataclass(frozen=True)
class Ran:
    """What a run of some microbatches has left: what it counted, and results by their index."""

    run: StepRun
    microbatches: tuple[int, ...]
    results: Mapping[int, Result]

    def fetch(self, index: int) -> list[torch.Tensor]:
        """The tensors of a result, one for each of the microbatches; may wait."""
        return self.results[index]()


class Gathering:
    """Makes whole parameters of the parts that the ranks of a group have, once per step.

    All of them name the same parameters: those that their stages read.
    """

    def __init__(
        self,
        names: Iterable[str],
        shards: Mapping[str, FlatShard],
        members: Members,
        backend: Backend,
    ):
        self._shards = {name: shards[name] for name in sorted(set(names) & set(shards))}
        self._members = members
        self._backend = backend

    @property
    def names(self) -> tuple[str, ...]:
        """What it makes whole, in order."""
        return tuple(self._shards)

    def __call__(self, held: Mapping[str, Buffer]) -> dict[str, Buffer]:
        """Whole parameters by name. All ranks of the group call it."""
        ranks, transport = self._members
        handles = [
            transport.all_gather(shard.padded(self._backend.view(held[name])), ranks)
            for name, shard in self._shards.items()
        ]
        values: list[torch.Tensor] = []
        for shard, handle in zip(self._shards.values(), handles, strict=True):
            flat = handle.result().flatten()
            values.append(flat[: shard.num_elements].view(shard.whole))
        return dict(zip(self._shards, self._backend.put(values, owned=True), strict=True))


class PlanRunner:
    """Runs one plan on one rank.

    Without a reduction it evaluates. Gathering makes divided parameters whole for a step; without
    it, programs take parts.

    Attributes:
        scheduled: the plan with the schedule of some microbatches, as `_scheduled` makes it.
    """

    def __init__(
        self,
        plan: StepPlan,
        states: ModelStates,
        link: PipelineLink,
        pp_rank: int,
        backend: Backend,
        reduction: StepReduction | None,
        models: tuple[str, ...],
        checks: IndexChecks,
        writes: StepWrites,
        constants: Constants,
        objects: Objects,
        group: Group,
        gathering: Gathering | None = None,
    ):
        self.plan = plan
        self.models = models
        self.checks = checks
        self._writes = writes
        self._gathering = gathering
        self.reduction = reduction
        self._gradients: Gradients | None = None
        self._states = states
        self._link = link
        self._pp_rank = pp_rank
        self._backend = backend
        specs = [program.lowered.spec for program in plan.programs.values()]
        self._buffers = {name for spec in specs for name in spec.buffers}
        needed = {name for spec in specs for name in spec.constants}
        values = plan.cut.step.constants.items()
        self._constants = constants
        self._read = {name: constants.of(value) for name, value in values if name in needed}
        constants.upload(self._read.values())
        self._outside = OutsideChanges(plan.cut.step.constants, needed, objects, group)
        self._objective_seeds: tuple[float, dict[torch.dtype, torch.Tensor]] | None = None
        if reduction is not None:
            self._objectives(reduction.objective_scale)
        self.scheduled = functools.lru_cache(_NUM_SCHEDULES)(self._scheduled)
        cut = plan.cut
        leaves = {
            s.index: {p.name: p.leaf for p in s.inputs if p.source is None} for s in cut.stages
        }
        self._executor = Executor(
            plan.programs, cut.forward, cut.backward, link, self._reduce, leaves, backend
        )

    def run(
        self,
        tensors: Sequence[list[torch.Tensor]],
        microbatches: tuple[int, ...],
        seed: int,
        progress: Progress,
        recorder: Recorder | None = None,
        gradients: Gradients | None = None,
    ) -> Ran:
        """Runs some microbatches of a call; every rank of the pipeline must.

        Tensors are those of every microbatch of the call, on the first pipeline rank. Without
        gradients it evaluates.
        """
        cut = self.plan.cut
        self._link.set_placement(cut.placement)
        self._outside.compare()
        given = self._tensors()
        self._gradients = gradients
        run = StepRun(
            tensors=dict(given),
            inputs=self._upload_inputs(tensors, microbatches),
            seeds=self._seeds(microbatches, seed),
            objective_seeds={} if gradients is None else self._objectives(gradients.scale),
            zeros=self._constants.zeros,
            accumulators={} if gradients is None else gradients.so_far,
            progress=progress,
            recorder=recorder,
        )
        plan = self.scheduled(microbatches, gradients is None or gradients.is_last)
        self._executor.run(plan.schedule[self._pp_rank], run)
        stages = self.plan.programs.values()
        changed = [name for stage in stages for name in stage.lowered.spec.new_buffers]
        self._copy_parameters_in(run, given, changed)
        results = exchange_results(cut, run.results, microbatches, self._pp_rank, self._link)
        show_prints(cut.step.prints, run.results, microbatches, self._backend.view)
        self._writes.keep(changed, given, run.tensors)
        if gradients is not None:
            gradients.keep(run.accumulators)
        self._gradients = None  # it holds what replicas have not added up
        run.release()
        return Ran(run, microbatches, results)

    def scale_rows(self, ran: Ran) -> None:
        """Scales rows of embeddings after a run; see `StepWrites.scale_rows`."""
        self._writes.scale_rows(ran.fetch)

    def _scheduled(self, microbatches: tuple[int, ...], reduces: bool) -> StepPlan:
        """The plan with the schedule of some microbatches; gradients may be complete then."""
        whole = self.plan.schedule
        schedule = tuple(actions_of(actions, microbatches, reduces) for actions in whole)
        return self.plan if schedule == whole else replace(self.plan, schedule=schedule)

    def _copy_parameters_in(
        self, run: StepRun, given: Mapping[str, torch.Tensor], changed: Sequence[str]
    ) -> None:
        """Copies parameters and buffers that are results, which later steps and updates change.

        Or to which this step has given new values, which the results are not to have.
        """
        lost = [given[name] for name in changed if name in given]
        copy_held(run.results, [*lost, *run.tensors.values()], self._backend)

    def problem_of_results(self, function: str, ran: Ran) -> str | None:
        """What is wrong with values that a run made; every rank of the pipeline."""
        prints, view = self.plan.cut.step.prints, self._backend.view
        problem = problem_of_checks(prints, function, ran.microbatches, ran.fetch, view)
        return problem or self.checks.problem_of_results(function, ran.microbatches, ran.fetch)

    def _reduce(self, stage: int, run: StepRun) -> None:
        assert self._gradients is not None, "only training steps have reductions"
        self._gradients.start(stage, run.accumulators)

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {
            name: tensor
            for name, tensor in dict(self._states.local_tensors()).items()
            # A tensor in an attribute that is computed of divided parameters is made by each step.
            if not isinstance(tensor, Valueless) or name in self._buffers
        }
        adopted = self._backend.adopt(list(tensors.values()))
        tensors = dict(zip(tensors, adopted, strict=True))
        if self._gathering is not None:
            tensors.update(self._gathering(tensors))
        self._constants.upload(self._read.values())
        tensors.update((name, constant.buffer) for name, constant in self._read.items())
        return tensors

    def _objectives(self, scale: float) -> dict[torch.dtype, torch.Tensor]:
        """The gradient of the objectives; on the device it stays until it changes."""
        if self._objective_seeds is None or self._objective_seeds[0] != scale:
            lowered = [stage.lowered for stage in self.plan.programs.values()]
            kinds = dict.fromkeys(one.backward_inputs[-1].dtype for one in lowered if one.backward)
            seeds = self._backend.put([torch.tensor(scale, dtype=kind) for kind in kinds])
            self._objective_seeds = scale, dict(zip(kinds, seeds, strict=True))
        return self._objective_seeds[1]

    def _upload_inputs(
        self, tensors: Sequence[list[torch.Tensor]], microbatches: Sequence[int]
    ) -> dict[int, list[torch.Tensor]]:
        own = {mb: tensors[mb] for mb in microbatches} if tensors else {}
        rest = iter(self._backend.put([t for leaves in own.values() for t in leaves]))
        return {mb: [next(rest) for _ in leaves] for mb, leaves in own.items()}

    def _seeds(self, microbatches: Sequence[int], seed: int) -> dict[tuple[int, int], torch.Tensor]:
        keys = [(stage, mb) for stage in self.plan.random_stages for mb in microbatches]
        values = [torch.tensor(_mix(seed, *key), dtype=torch.int64) for key in keys]
        return dict(zip(keys, self._backend.put(values), strict=True))


def _mix(seed: int, stage: int, microbatch: int) -> int:
    """A seed for one program call, far from those of its neighbours (splitmix64's finalizer)."""
    value = (seed + 0x9E3779B97F4A7C15 * (1 + microbatch + (stage << 32))) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 1
