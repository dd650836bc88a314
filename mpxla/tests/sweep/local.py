"""A step cut into stages that all run in this process, one after the other.

The same capture, cut, lowering, executables and executor as in a job of several ranks; values cross
from stage to stage without a message.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpxla.config import Config
from mpxla.device.torch_xla.tensors import current_device, to_device, to_host
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import ToCapture, capture_step
from mpxla.runtime.executor import Executor, StepRun
from mpxla.runtime.plans.cut import CutStep, cut_step
from mpxla.runtime.plans.plan import compile_stages
from mpxla.runtime.plans.scheduling import schedule_step
from mpxla.schedule.action import Action, Op
from mpxla.tests.backends import backend_here

__all__ = ["LocalStep", "StepValues"]


@dataclass(frozen=True)
class StepValues:
    """What a step gave: its results, and the gradient of every trained parameter that it reads."""

    results: tuple[torch.Tensor, ...]
    gradients: Mapping[str, torch.Tensor]
    new_buffers: Mapping[str, torch.Tensor]


class LocalStep:
    """A model's step, compiled for this process's device.

    Args:
        model: what the step runs; it has its parameters on the host.
        leaves: tensors that the step takes.
        pins: module path -> stage, for two stages; all modules are one stage without it.
        num_stages: how many stages.
        function: takes the model and the leaves, returns (objective or None, results).
    """

    def __init__(
        self,
        model: nn.Module,
        leaves: Sequence[torch.Tensor],
        function: Callable[..., tuple[torch.Tensor | None, Sequence[torch.Tensor]]],
        pins: Mapping[str, int] | None = None,
        num_stages: int = 1,
    ):
        self._model, self._leaves = model, leaves
        names = {n: n for n, _ in (*model.named_parameters(), *model.named_buffers())}

        def step(arguments: Sequence[torch.Tensor]) -> Any:
            objective, results = function(model, *arguments)
            if objective is not None:
                current_recorder().backward(objective, None)
            return tuple(results)

        graph = capture_step(ToCapture(step, model, leaves, names))
        config = Config(
            pipeline_parallel_degree=num_stages,
            auto_partition=False,
            default_partition=0,
            microbatches=1,
        )
        pins = {f"model.{path}": stage for path, stage in (pins or {}).items()}
        self.cut: CutStep = cut_step(graph, config, backend_here().lowering, pins, None)
        schedule = schedule_step(self.cut, config)
        self.programs = {}
        for rank in range(num_stages):
            self.programs.update(compile_stages(self.cut, schedule, rank, backend_here()).programs)

    def run(self, seed: int = 0) -> StepValues:
        """Runs the step for one microbatch."""
        device, stages = current_device(), self.cut.stages
        held = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        held |= self.cut.step.constants
        run = StepRun(
            tensors=dict(zip(held, to_device(list(held.values()), device), strict=True)),
            inputs=[to_device(list(self._leaves), device)],
            seeds={
                (stage.index, 0): to_device([torch.tensor(seed + stage.index)], device)[0]
                for stage in stages
            },
            objective_seeds={
                dtype: to_device([torch.tensor(1.0, dtype=dtype)], device)[0]
                for dtype in (torch.float32, torch.float64)
            },
            zeros=backend_here().zeros,
        )
        leaves = {s.index: {p.name: p.leaf for p in s.inputs if p.source is None} for s in stages}
        executor = Executor(self.programs, (), (), None, lambda stage, run: None, leaves)
        executor.run(self._actions(), run)
        return self._values(run)

    def _actions(self) -> list[Action]:
        order = [stage.index for stage in self.cut.stages]
        actions = [Action(index, Op.FORWARD, 0) for index in order]
        if self.cut.step.is_training:
            actions += [Action(index, Op.BACKWARD, 0) for index in reversed(order)]
        return actions

    def _values(self, run: StepRun) -> StepValues:
        assert run.values.is_empty()
        gradients: dict[str, torch.Tensor] = {}
        for stage in self.cut.stages:
            found = run.accumulators.get(stage.index, [])
            for name, value in zip(stage.trained, to_host(found), strict=bool(found)):
                gradients[name] = gradients[name] + value if name in gradients else value
        buffers = sorted({name for stage in self.cut.stages for name in stage.new_buffers})
        return StepValues(
            results=tuple(
                to_host([run.results[i, 0] for i in sorted(index for index, _ in run.results)])
            ),
            gradients=gradients,
            new_buffers=dict(
                zip(buffers, to_host([run.tensors[name] for name in buffers]), strict=True)
            ),
        )
