"""One plan, ready to run again and again: uploads, actions, results, gradients.

Everything that does not change between calls is made once, when the plan is new.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mpxla.comm.stall import Progress
from mpxla.device.backend import Backend
from mpxla.runtime.debug import problem_of_checks, show_prints
from mpxla.runtime.exchange import exchange_results
from mpxla.runtime.executor import Executor, StepRun
from mpxla.runtime.gathering import Gathering
from mpxla.runtime.gradient_looks import show_gradients
from mpxla.runtime.index_checks import IndexChecks
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.outputs import build_outputs
from mpxla.runtime.plan import StepPlan
from mpxla.runtime.recorder import Recorder
from mpxla.runtime.reduction import StepReduction
from mpxla.runtime.states import ModelStates
from mpxla.runtime.step_writes import StepWrites, copy_held
from mpxla.stage.spec import TensorSpec

__all__ = ["PlanRunner"]


class PlanRunner:
    """Runs one plan on one rank.

    Args:
        plan: what to run.
        states: parameters and buffers of all models.
        link: messages between pipeline ranks.
        pp_rank: this rank.
        backend: of this rank's device.
        reduction: of the gradients over replicas; None for an evaluation step.
        models: labels of the models that the step uses.
        checks: of the indices in the step.
        writes: what the step writes to parameters and buffers.
        gathering: makes divided parameters whole for a step; None where programs take parts.
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
        gathering: Gathering | None = None,
    ):
        self.plan = plan
        self.models = models
        self.checks = checks
        self._writes = writes
        self._gathering = gathering
        self._fetch: Callable[[int], list[torch.Tensor]] | None = None
        self._states = states
        self._link = link
        self._pp_rank = pp_rank
        self._backend = backend
        self._reduction = reduction
        needed = {n for p in plan.programs.values() for n in p.lowered.spec.constants}
        self._given = {n: v for n, v in plan.cut.step.constants.items() if n in needed}
        self._constants: dict[str, torch.Tensor] = {}
        self._copies: dict[str, torch.Tensor] = {}
        self._upload_constants()
        self._zeros: dict[TensorSpec, torch.Tensor] = {}
        self._objective_seeds: tuple[float, dict[torch.dtype, torch.Tensor]] | None = None
        self._seeds_of_objectives()
        cut = plan.cut
        leaves = {
            s.index: {p.name: p.leaf for p in s.inputs if p.source is None} for s in cut.stages
        }
        self._executor = Executor(
            plan.programs, cut.forward, cut.backward, link, self._reduce, leaves, backend
        )

    def run(
        self,
        tensors: list[list[torch.Tensor]],
        num_microbatches: int,
        seed: int,
        progress: Progress,
        recorder: Recorder | None = None,
        own: slice = slice(None),
    ) -> tuple[Any, StepRun]:
        """Runs the step once; every rank of the pipeline must.

        Args:
            tensors: tensor leaves of every microbatch, on the first pipeline rank.
            num_microbatches: how many there are.
            seed: from which the seeds of random programs are drawn.
            progress: is told what runs.
            recorder: notes what runs when, while a profile is taken.
            own: the microbatches that this rank brought, whose results it gets.

        Returns:
            What the step function returns, and the state of the run.
        """
        cut = self.plan.cut
        self._link.set_placement(cut.placement)
        given = self._tensors()
        run = StepRun(
            tensors=dict(given),
            inputs=self._upload_inputs(tensors),
            seeds=self._seeds(num_microbatches, seed),
            objective_seeds=self._seeds_of_objectives(),
            zeros=self._zeros_of,
            progress=progress,
            recorder=recorder,
        )
        if self._reduction is not None:
            self._reduction.begin()
        self._executor.run(self.plan.schedule[self._pp_rank], run)
        stages = self.plan.programs.values()
        changed = [name for stage in stages for name in stage.lowered.spec.new_buffers]
        self._copy_parameters_in(run, given, changed)
        self._fetch = fetch = exchange_results(
            cut, run.results, num_microbatches, self._pp_rank, self._link
        )
        show_prints(cut.step.prints, run.results, num_microbatches, self._backend.view)
        self._writes.keep(changed, given, run.tensors)
        if self._reduction is not None:
            self._reduction.finish(run.accumulators)
        run.release()
        show_gradients(cut.step.looking, self._states)
        self._writes.scale_rows(fetch)
        backend, count = self._backend, len(range(num_microbatches)[own])
        leaves, structure = cut.step.result_leaves, cut.step.result_spec
        returned = build_outputs(
            leaves,
            structure,
            count,
            lambda index: backend.publish(fetch(index)[own]),
            backend.adopt,
        )
        return returned, run

    def _copy_parameters_in(
        self, run: StepRun, given: Mapping[str, torch.Tensor], changed: Sequence[str]
    ) -> None:
        """Copies parameters that are results, whose memory the next update would take.

        Or that this step has given new values, which the results are not to have.
        """
        lost = [given[name] for name in changed if name in given]
        held = lost + [*run.tensors.values()] * self._backend.donates
        copy_held(run.results, held, self._backend)

    def problem_of_results(self, function: str, num_microbatches: int) -> str | None:
        """What is wrong with values that the last run made; every rank of the pipeline."""
        fetch, self._fetch = self._fetch, None  # it holds the results of a step
        assert fetch is not None, "a step has run"
        prints, view = self.plan.cut.step.prints, self._backend.view
        problem = problem_of_checks(prints, function, num_microbatches, fetch, view)
        return problem or self.checks.problem_of_results(function, num_microbatches, fetch)

    def _reduce(self, stage: int, run: StepRun) -> None:
        assert self._reduction is not None, "only training steps have reductions"
        self._reduction.start(stage, run.accumulators)

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = dict(self._states.local_tensors())
        adopted = self._backend.adopt(list(tensors.values()))
        tensors = dict(zip(tensors, adopted, strict=True))
        if self._gathering is not None:
            tensors.update(self._gathering(tensors))
        self._upload_constants()
        tensors.update(self._constants)
        return tensors

    def _upload_constants(self) -> None:
        """Those that are not on the device, or have changed since they were put there.

        A loss scale is one, and so are the weights of a module that is not distributed. They are
        compared by their numbers, since writes to `.data` or by NumPy are not counted by PyTorch.
        """
        known = self._copies
        copies = {
            name: value.detach().clone()
            for name, value in self._given.items()
            if name not in known or not torch.equal(value, known[name])
        }
        if not copies:
            return
        uploaded = self._backend.put(list(copies.values()), owned=True)
        self._constants.update(zip(copies, uploaded, strict=True))
        self._copies.update(copies)

    def _seeds_of_objectives(self) -> dict[torch.dtype, torch.Tensor]:
        """The gradient of the objectives; on the device it stays until it changes."""
        if self._reduction is None:
            return {}
        scale = self._reduction.objective_scale
        if self._objective_seeds is None or self._objective_seeds[0] != scale:
            lowered = [stage.lowered for stage in self.plan.programs.values()]
            kinds = dict.fromkeys(one.backward_inputs[-1].dtype for one in lowered if one.backward)
            seeds = self._backend.put([torch.tensor(scale, dtype=kind) for kind in kinds])
            self._objective_seeds = scale, dict(zip(kinds, seeds, strict=True))
        return self._objective_seeds[1]

    def _upload_inputs(self, tensors: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        rest = iter(self._backend.put([t for mb in tensors for t in mb]))
        return [[next(rest) for _ in mb] for mb in tensors]

    def _seeds(self, count: int, seed: int) -> dict[tuple[int, int], torch.Tensor]:
        keys = [(stage, mb) for stage in self.plan.random_stages for mb in range(count)]
        values = [torch.tensor(_mix(seed, *key), dtype=torch.int64) for key in keys]
        return dict(zip(keys, self._backend.put(values), strict=True))

    def _zeros_of(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """What gradients start from: new buffers where backwards take them, else the same."""
        if self._backend.donates:
            return self._backend.zeros(specs)
        new = [spec for spec in dict.fromkeys(specs) if spec not in self._zeros]
        self._zeros.update(zip(new, self._backend.zeros(new), strict=True))
        return [self._zeros[spec] for spec in specs]


def _mix(seed: int, stage: int, microbatch: int) -> int:
    """A seed for one program call, far from those of its neighbours (splitmix64's finalizer)."""
    value = (seed + 0x9E3779B97F4A7C15 * (1 + microbatch + (stage << 32))) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 1
