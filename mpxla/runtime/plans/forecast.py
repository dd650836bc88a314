"""What a step will take, before it runs: times, memory, links and programs, from costs alone.

The same plan that ranks run (`plan.py`) is made for all of them at once, lowered but not compiled,
and simulated with the costs of its nodes. Nothing here touches a device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mpxla.config import Config
from mpxla.device.backend import Lowering
from mpxla.graph.collectives import collective_bytes
from mpxla.graph.cost import MachineModel
from mpxla.runtime.plans.activations import PlannedStage, plan_stages, recomputed_nodes
from mpxla.runtime.plans.cut import CutStep
from mpxla.runtime.plans.scheduling import schedule_step, stage_costs
from mpxla.runtime.saved import held_bytes
from mpxla.schedule.action import Op, Schedule
from mpxla.schedule.analysis import link_bytes
from mpxla.schedule.search import StepCosts, simulated
from mpxla.schedule.timeline import Timeline
from mpxla.stage.lower import LoweredStage, TracedStage
from mpxla.stage.making import graphs_made_quickly
from mpxla.stage.spec import TensorSpec
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
        num_collectives: messages among the ranks that share tensors.
        collective_bytes: what a rank sends in them.
    """

    rank: int
    name: str
    num_operations: int
    argument_bytes: int
    num_collectives: int = 0
    collective_bytes: int = 0


@dataclass(frozen=True)
class Forecast:
    """The prediction for one step.

    Attributes:
        cut: the step in stages.
        schedule: actions of every rank.
        costs: what it takes and keeps.
        timeline: when everything would run, in seconds.
        activation_bytes: per rank, the peak of saved activations.
        rank_bytes: these with parameters, gradients and optimizer state.
        links: (sending rank, receiving rank) -> bytes per step.
        programs: what ranks compile.
    """

    cut: CutStep
    schedule: Schedule
    costs: StepCosts
    timeline: Timeline
    activation_bytes: tuple[int, ...]
    rank_bytes: tuple[int, ...]
    links: Mapping[tuple[int, int], int]
    programs: tuple[Program, ...]


@graphs_made_quickly()
def forecast(cut: CutStep, config: Config, machine: MachineModel, lowering: Lowering) -> Forecast:
    """Predicts a step.

    Raises:
        ConfigError: a rank has too little memory for activations.
        ScheduleError: the schedule cannot run.
    """
    schedule = schedule_step(cut, config)
    planned: dict[int, PlannedStage] = {}
    for rank, actions in enumerate(schedule):
        own = [stage for stage in cut.stages if cut.placement[stage.index] == rank]
        keeps, trains = config.activation_memory, cut.step.is_training
        planned |= plan_stages(own, actions, rank, lowering, keeps, trains, tells=False)
    lowered = [planned[stage.index].lowered for stage in cut.stages]
    splits = {index: stage.split for index, stage in planned.items() if stage.split is not None}
    costs = _step_costs(cut, machine, lowered, splits)
    num_bytes = {(t.source, t.target): t.num_bytes for t in (*cut.forward, *cut.backward)}
    return Forecast(
        cut,
        schedule,
        costs,
        *simulated(schedule, cut.placement, costs),
        link_bytes(schedule, cut.placement, num_bytes),
        tuple(_programs(cut, lowered, splits)),
    )


def predict_costs(
    cut: CutStep, machine: MachineModel, lowering: Lowering, shares: Sequence[float] = (1.0,)
) -> list[StepCosts]:
    """What a step takes and keeps under any schedule, with whole or split backwards.

    One for every share that stages keep for their backwards, see `TracedStage.lowered`.
    """
    traced = [TracedStage(stage, cut.step.is_training, lowering) for stage in cut.stages]
    found: list[StepCosts] = []
    for share in shares:
        lowered = [stage.lowered(share) for stage in traced]
        splits = {
            index: split_backward(stage, lowering.device)
            for index, stage in enumerate(lowered)
            if stage.backward is not None
        }
        found.append(_step_costs(cut, machine, lowered, splits))
    return found


def _step_costs(
    cut: CutStep,
    machine: MachineModel,
    lowered: list[LoweredStage],
    splits: Mapping[int, SplitBackward],
) -> StepCosts:
    """Times, saved bytes and parameters of a step in stages."""
    first = cut.placement[0]
    held = [
        held_bytes(stage, splits.get(stage.spec.index), cut.placement[stage.spec.index] == first)
        for stage in lowered
    ]
    costs = stage_costs(cut, machine).plus(_recomputed(cut, lowered))
    costs = costs.plus(_collectives(machine, lowered))
    copies = [stage.moved / machine.host_bytes_per_s for stage in held]
    return StepCosts(
        replace(costs, copy=copies),
        *cut.edges,
        held,
        cut.partition.rank_bytes(cut.partition.parameter_bytes),
    )


def _recomputed(cut: CutStep, lowered: list[LoweredStage]) -> dict[Op, list[float]]:
    """What backwards compute again, before anything else of them can run."""
    seconds = {
        group[0].name: cost
        for group, cost in zip(cut.problem.members, cut.problem.forward_s, strict=True)
    }
    again = [sum(seconds.get(name, 0.0) for name in recomputed_nodes(s)) for s in lowered]
    return {Op.BACKWARD: again, Op.INPUT_GRADIENT: again}


def _collectives(machine: MachineModel, lowered: list[LoweredStage]) -> dict[Op, list[float]]:
    """Messages among the ranks that share tensors, which nothing overlaps."""

    def seconds(graph: torch.fx.Graph) -> float:
        return sum(map(collective_bytes, graph.nodes)) / machine.link_bytes_per_s

    there = [seconds(stage.forward.graph) for stage in lowered]
    back = [
        0.0 if stage.backward is None else seconds(stage.backward.derivative.graph)
        for stage in lowered
    ]
    return {Op.FORWARD: there, Op.BACKWARD: back, Op.INPUT_GRADIENT: back}


def _programs(
    cut: CutStep, lowered: list[LoweredStage], splits: Mapping[int, SplitBackward]
) -> list[Program]:
    found: list[Program] = []

    def add(
        stage: LoweredStage, what: str, graph: torch.fx.Graph, inputs: Sequence[TensorSpec]
    ) -> None:
        index = stage.spec.index
        count = sum(node.op == "call_function" for node in graph.nodes)
        size = sum(spec.num_bytes for spec in inputs)
        sent = [collective_bytes(node) for node in graph.nodes]
        messages = sum(part > 0 for part in sent), sum(sent)
        name = f"stage {index} {what}"
        found.append(Program(cut.placement[index], name, count, size, *messages))

    for stage in lowered:
        add(stage, "forward", stage.forward.graph, stage.forward_inputs)
        split = splits.get(stage.spec.index)
        if split is not None:
            parts = (("input gradients", split.input_part), ("weight gradients", split.weight_part))
            for what, part in parts:
                if part is not None:
                    add(stage, what, part.graph.graph, part.inputs)
        elif stage.backward is not None:
            add(stage, "backward", stage.backward.derivative.graph, stage.backward_inputs)
    return found
