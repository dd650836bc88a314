"""What a step will take, before it runs: times, memory, links and programs, from costs alone.

The same plan that ranks run (`plan.py`) is made for all of them at once, lowered but not compiled,
and simulated with the costs of its nodes. Nothing here touches a device.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mpxla.config import Config
from mpxla.device.backend import Lowering
from mpxla.graph.cost import MachineModel
from mpxla.runtime.plan import CutStep, schedule_step, stage_costs
from mpxla.runtime.saved import is_activation, saved_bytes
from mpxla.schedule.action import Action, Op
from mpxla.schedule.analysis import link_bytes, peak_bytes
from mpxla.schedule.search import StepCosts
from mpxla.schedule.simulate import Costs, simulate
from mpxla.schedule.timeline import Timeline
from mpxla.stage.lower import LoweredStage, lower_stage
from mpxla.stage.split_backward import SplitBackward, split_backward

__all__ = ["Forecast", "Program", "forecast", "predict_costs"]


@dataclass(frozen=True)
class Program:
    """A program that some rank will compile.

    Attributes:
        rank: pipeline rank.
        name: such as "stage 1 forward".
        num_operations: calls in its graph.
        argument_bytes: bytes of its arguments.
    """

    rank: int
    name: str
    num_operations: int
    argument_bytes: int


@dataclass(frozen=True)
class Forecast:
    """The prediction for one step.

    Attributes:
        cut: the step in stages.
        schedule: actions of every rank.
        timeline: when everything would run, in seconds.
        costs: what it takes and keeps.
        activation_bytes: per rank, the peak of saved activations.
        links: (sending rank, receiving rank) -> bytes per step.
        programs: what ranks compile.
    """

    cut: CutStep
    schedule: tuple[tuple[Action, ...], ...]
    timeline: Timeline
    costs: StepCosts
    activation_bytes: tuple[int, ...]
    links: Mapping[tuple[int, int], int]
    programs: tuple[Program, ...]

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Per rank, parameters, gradients and optimizer state, and the peak of activations."""
        pairs = zip(self.costs.fixed_bytes, self.activation_bytes, strict=True)
        return tuple(fixed + saved for fixed, saved in pairs)


def forecast(cut: CutStep, config: Config, machine: MachineModel, lowering: Lowering) -> Forecast:
    """Predicts a step.

    Args:
        cut: the step in stages.
        config: schedule and number of microbatches.
        machine: rates of the target.
        lowering: what the backend wants.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    schedule = schedule_step(cut, config)
    lowered = _lower_all(cut, lowering)
    splits = {
        stage: split_backward(lowered[stage], lowering.device)
        for stage in {a.stage for actions in schedule for a in actions}
        if _is_split(stage, schedule) and lowered[stage].backward is not None
    }
    costs = _step_costs(cut, machine, lowered, splits)
    num_bytes = {(t.source, t.target): t.num_bytes for t in (*cut.forward, *cut.backward)}
    return Forecast(
        cut,
        schedule,
        _timeline(cut, schedule, costs.costs),
        costs,
        peak_bytes(schedule, costs.saved_bytes, costs.kept_bytes),
        link_bytes(schedule, cut.placement, num_bytes),
        tuple(_programs(cut, lowered, splits)),
    )


def predict_costs(cut: CutStep, machine: MachineModel, lowering: Lowering) -> StepCosts:
    """What a step takes and keeps under any schedule, with whole or split backwards.

    Args:
        cut: the step in stages.
        machine: rates of the target.
        lowering: what the backend wants.
    """
    lowered = _lower_all(cut, lowering)
    splits = {
        index: split_backward(stage, lowering.device)
        for index, stage in enumerate(lowered)
        if stage.backward is not None
    }
    return _step_costs(cut, machine, lowered, splits)


def _timeline(cut: CutStep, schedule: tuple[tuple[Action, ...], ...], costs: Costs) -> Timeline:
    """When every action would run, in seconds, if messages do not hold ranks."""
    forward = {(t.source, t.target) for t in cut.forward}
    backward = {(t.source, t.target) for t in cut.backward}
    return simulate(schedule, cut.placement, forward, backward, costs, rendezvous=False)


def _lower_all(cut: CutStep, lowering: Lowering) -> list[LoweredStage]:
    """Lowers every stage of a step, on any rank."""
    return [lower_stage(stage, cut.step.is_training, lowering) for stage in cut.stages]


def _is_split(stage: int, schedule: tuple[tuple[Action, ...], ...]) -> bool:
    return any(Action(stage, Op.INPUT_GRADIENT, 0) in actions for actions in schedule)


def _step_costs(
    cut: CutStep,
    machine: MachineModel,
    lowered: list[LoweredStage],
    splits: Mapping[int, SplitBackward],
) -> StepCosts:
    """Times, saved bytes and parameters of a step in stages.

    Args:
        cut: the step in stages.
        machine: rates of the target.
        lowered: every stage, for what it really saves.
        splits: the split backwards among them.
    """
    saved = [saved_bytes(stage) for stage in lowered]
    kept = [
        _kept_bytes(stage, splits[stage.spec.index]) if stage.spec.index in splits else bytes_
        for stage, bytes_ in zip(lowered, saved, strict=True)
    ]
    fixed = [0] * cut.partition.num_ranks
    for name, ranks in cut.partition.parameter_ranks.items():
        for rank in ranks:
            fixed[rank] += cut.partition.parameter_bytes[name]
    return StepCosts(
        stage_costs(cut, machine),
        frozenset((t.source, t.target) for t in cut.forward),
        frozenset((t.source, t.target) for t in cut.backward),
        saved,
        kept,
        fixed,
    )


def _saved_argument_bytes(stage: LoweredStage) -> list[int]:
    """Bytes of every saved argument of the backward that belongs to one microbatch."""
    return [
        stage.saved_specs[s.output].num_bytes
        if s.output is not None
        else stage.forward_inputs[s.argument].num_bytes * is_activation(stage, s.argument)
        for s in stage.saved
    ]


def _kept_bytes(stage: LoweredStage, split: SplitBackward) -> int:
    if split.weight_part is None:
        return 0
    own = _saved_argument_bytes(stage)
    rest = stage.backward_inputs[stage.num_accumulators + len(own) :]
    sizes = own + [spec.num_bytes for spec in rest]
    return split.crossing_bytes + sum(sizes[i] for i in split.weight_part.arguments)


def _programs(
    cut: CutStep, lowered: list[LoweredStage], splits: Mapping[int, SplitBackward]
) -> list[Program]:
    found: list[Program] = []

    def add(stage: LoweredStage, what: str, graphs: list[torch.fx.Graph], inputs: tuple) -> None:
        index = stage.spec.index
        count = sum(node.op == "call_function" for graph in graphs for node in graph.nodes)
        size = sum(spec.num_bytes for spec in inputs)
        found.append(Program(cut.placement[index], f"stage {index} {what}", count, size))

    for stage in lowered:
        add(stage, "forward", [stage.forward.graph], stage.forward_inputs)
        split = splits.get(stage.spec.index)
        if split is not None:
            parts = (("input gradients", split.input_part), ("weight gradients", split.weight_part))
            for what, part in parts:
                if part is not None:
                    add(stage, what, [part.graph.graph], part.inputs)
        elif stage.backward is not None:
            modules = stage.backward.modules()
            graphs = [m.graph for m in modules if isinstance(m, torch.fx.GraphModule)]
            add(stage, "backward", graphs, stage.backward_inputs)
    return found
