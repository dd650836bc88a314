"""From a signature to everything a rank needs to run it: the plan of a step.

Phases: capture the step, partition it (or follow an earlier partition), split it into stages,
generate and prove the schedule, place parameters, lower and compile this rank's stages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mpxla.comm.transport import Groups
from mpxla.config import Config
from mpxla.device.backend import Backend, Executable, Lowering
from mpxla.graph.cost import MachineModel, PartitionProblem, build_problem
from mpxla.graph.partition import Partition, SavedTensor
from mpxla.graph.partition_auto import partition_auto
from mpxla.graph.partition_manual import partition_manual
from mpxla.graph.placement import rank_of
from mpxla.graph.regions import check_regions
from mpxla.graph.split import backward_transfers, forward_transfers, split_stages
from mpxla.graph.stepgraph import InputKind, StepGraph, is_random
from mpxla.log import warn_once
from mpxla.runtime.activations import PlannedStage, plan_stages, stage_bytes
from mpxla.runtime.executor import CompiledStage
from mpxla.runtime.kept_steps import KeptSteps
from mpxla.runtime.partition_store import read_decision
from mpxla.runtime.saved import saved_tensors
from mpxla.schedule.action import Action, format_schedule
from mpxla.schedule.analysis import StageBytes, held_over_time
from mpxla.schedule.choice import (
    compute_actions,
    custom_schedule,
    in_flight,
    paces,
    placement_of,
)
from mpxla.schedule.copies import add_copies, has_copies
from mpxla.schedule.dataflow import Edge
from mpxla.schedule.lower import add_communication, add_reduce
from mpxla.schedule.simulate import Costs, simulate
from mpxla.schedule.timeline import Timeline
from mpxla.stage.flat import SHARDING_GROUP, FlatShard
from mpxla.stage.layout import transpose
from mpxla.stage.lower import LoweredStage
from mpxla.stage.piecewise import PiecewiseExecutable
from mpxla.stage.program import trace_program
from mpxla.stage.sharded import divide_stage, exchanges
from mpxla.stage.spec import StageSpec, TensorSpec, Transfer
from mpxla.stage.split_backward import SplitBackward

__all__ = [
    "CutStep",
    "StepPlan",
    "compile_stages",
    "constant_tensors",
    "cut_step",
    "describe_plan",
    "schedule_step",
    "simulate_step",
    "stage_costs",
    "weighs_memory",
]


_Compile = Callable[..., Executable]
"""`Backend.compile`, with signs of life."""


@dataclass(frozen=True)
class CutStep:
    """A step cut into stages; equal on all ranks of a job.

    Attributes:
        step: the captured step.
        problem: what the partitioner was given.
        partition: what it decided.
        in_flight: per stage, the microbatches of which it holds activations at a time.
        stages: the stages.
        forward: messages of activations between stages.
        backward: messages of gradients.
        saved: what the derivatives of its nodes read, if the partition weighed it.
    """

    step: StepGraph
    problem: PartitionProblem
    partition: Partition
    in_flight: tuple[int, ...]
    stages: tuple[StageSpec, ...]
    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]
    saved: Mapping[str, tuple[SavedTensor, ...]]

    @property
    def placement(self) -> tuple[int, ...]:
        """Pipeline rank of every stage."""
        return self.partition.placement

    @property
    def edges(self) -> tuple[frozenset[Edge], frozenset[Edge]]:
        """(source, target) stages of messages with activations, and with gradients."""
        forward, backward = (
            frozenset((t.source, t.target) for t in transfers)
            for transfers in (self.forward, self.backward)
        )
        return forward, backward

    def parameter_ranks(self) -> dict[str, tuple[int, ...]]:
        """Pipeline ranks that hold each parameter or buffer that the step reads."""
        holders: dict[str, set[int]] = {}
        for stage in self.stages:
            for name in (*stage.parameters, *stage.buffers):
                holders.setdefault(name, set()).add(self.placement[stage.index])
        return {name: tuple(sorted(ranks)) for name, ranks in holders.items()}

    def trained_stages(self) -> dict[str, tuple[int, ...]]:
        """Stages that contribute to each parameter's gradient."""
        stages: dict[str, list[int]] = {}
        for stage in self.stages:
            for name in stage.trained:
                stages.setdefault(name, []).append(stage.index)
        return {name: tuple(found) for name, found in stages.items()}

    def owner_of_result(self) -> dict[int, int]:
        """Stage that computes each result of the step."""
        return {index: stage.index for stage in self.stages for index in stage.results}

    def result_specs(self) -> dict[int, TensorSpec]:
        """Spec of each result of the step."""
        return {
            index: spec
            for stage in self.stages
            for index, spec in zip(stage.results, stage.result_specs, strict=True)
        }

    def description(self) -> list[str]:
        """Lines that are equal on two ranks if they cut the same step in the same way."""
        lines: list[str] = []
        for stage in self.stages:
            where = f"stage {stage.index} of partition {self.placement[stage.index]}"
            lines += [f"{node.format_node()} in {where}" for node in stage.graph.nodes]
            lines += [f"{where} with {held}" for held in (stage.parameters, stage.buffers)]
            lines += [f"{where} with {port}" for port in (*stage.inputs, *stage.outputs)]
        return lines


@dataclass(frozen=True)
class StepPlan:
    """What one rank runs for one signature.

    Attributes:
        cut: the step in stages.
        schedule: actions of every pipeline rank.
        programs: this rank's compiled stages by index.
        random_stages: this rank's stages that draw random numbers.
        is_random: whether any stage of the step does.
    """

    cut: CutStep
    schedule: tuple[tuple[Action, ...], ...]
    programs: Mapping[int, CompiledStage]
    random_stages: tuple[int, ...]
    is_random: bool

    def messages(self, group: str) -> list[str]:
        """What programs exchange within a group while they run; all members must have the same."""
        programs = (p for stage in self.programs.values() for p in stage.programs)
        in_pieces = (p for p in programs if isinstance(p, PiecewiseExecutable))
        return [f"{p.name}: {line}" for p in in_pieces for line in p.plan.messages(group)]

    def exchanges(self) -> list[str]:
        """What this rank's programs gather of parameters and scatter of gradients, in order."""
        lines: list[str] = []
        for index, stage in self.programs.items():
            backward = stage.lowered.backward
            graphs = {"forward": stage.lowered.forward.graph}
            if backward is not None:
                graphs["backward"] = backward.derivative.graph
            for which, graph in graphs.items():
                lines += [f"stage {index} {which} {line}" for line in exchanges(graph)]
        return [*lines, *self.messages(SHARDING_GROUP)]


def cut_step(
    step: StepGraph,
    config: Config,
    lowering: Lowering,
    pins: Mapping[str, int],
    fixed: Mapping[str, tuple[int, ...]] | None,
    stateful: frozenset[str] = frozenset(),
    measured_s: Mapping[str, float] | None = None,
    saved: Mapping[str, tuple[SavedTensor, ...]] | None = None,
    machine: MachineModel | None = None,
) -> CutStep:
    """Partitions a step and splits it.

    Args:
        step: the captured step.
        config: degrees, weights and whether to partition automatically.
        lowering: what the backend wants; says what stages will save.
        pins: module path -> pipeline rank, from `smp.partition` and `smp.set_partition`.
        fixed: where parameters and buffers live already, from an earlier signature; of any model.
        stateful: buffers that some step changes.
        measured_s: seconds of nodes by name, in place of estimates.
        saved: the result of `saved_tensors`, if it is known already. By default it is found where
            it decides something, because that takes about half as long as lowering.
        machine: rates of the target, for what was not measured; the built-in ones by default.

    Raises:
        PartitionError: the step cannot be cut as asked.
        ScheduleError: the user's schedule has stages elsewhere.
    """
    machine = machine or MachineModel()
    placement = placement_of(config)
    if saved is None:
        saved = saved_tensors(step, lowering) if weighs_memory(config) else {}
    problem = build_problem(step, machine, stateful, measured_s, saved, config.has_masters)
    is_first = not fixed
    fixed = {n: r for n, r in (fixed or {}).items() if n in problem.parameter_bytes}
    degree = config.pipeline_parallel_degree
    if config.load_partition and is_first:
        partition = read_decision(config, problem)
    elif config.auto_partition:
        counts = in_flight(config, placement, step.is_training)
        partition = partition_auto(
            problem.nodes,
            problem.parameter_bytes,
            len(placement),
            config.memory_weight,
            1.0 / machine.link_bytes_per_s,
            fixed=fixed,
            placement=placement,
            in_flight=counts,
            paces=paces(config, counts, step.is_training, _forward_share(problem)),
        )
    else:
        partition = partition_manual(
            problem.nodes,
            problem.parameter_bytes,
            degree,
            _pin_nodes(problem, pins),
            config.default_partition,
            fixed=fixed,
        )
    stages_of: dict[fx.Node, Sequence[int]] = {}
    for index, group in enumerate(problem.members):
        for node in group:
            if node.op != "placeholder":
                stages_of[node] = partition.stages_of(index)
    is_manual = not (config.auto_partition or config.load_partition)
    for line in check_regions(step, stages_of, partition.placement, is_manual):
        warn_once(line, line)
    stages = split_stages(step, stages_of, partition.num_stages)
    return CutStep(
        step,
        problem,
        partition,
        in_flight(config, partition.placement, step.is_training),
        stages,
        forward_transfers(stages),
        backward_transfers(stages),
        saved,
    )


def _forward_share(problem: PartitionProblem) -> float:
    """Share of forwards in the compute of a step."""
    total_s = sum(node.cost.compute_s for node in problem.nodes)
    return sum(problem.forward_s) / total_s if total_s else 0.0


def weighs_memory(config: Config) -> bool:
    """Whether the automatic partition has a choice that depends on what stages keep."""
    is_automatic = config.auto_partition and not config.load_partition
    return is_automatic and config.memory_weight > 0 and len(placement_of(config)) > 1


def _pin_nodes(problem: PartitionProblem, pins: Mapping[str, int]) -> dict[int, int]:
    """Rank of every node whose innermost tagged module gives one."""
    ranks = [rank_of(node.module_path, pins) for node in problem.nodes]
    return {index: rank for index, rank in enumerate(ranks) if rank is not None}


def schedule_step(cut: CutStep, config: Config) -> tuple[tuple[Action, ...], ...]:
    """Generates every rank's actions and proves them free of deadlock.

    Raises:
        ScheduleError: a bug in a schedule; the text shows the grid.
    """
    edges, is_training = cut.edges, cut.step.is_training
    custom = custom_schedule(config) if is_training else None
    if custom is not None:
        schedule = custom.lower(*edges)
    else:
        compute = compute_actions(config, cut.placement, is_training)
        schedule = add_communication(compute, cut.placement, *edges)
        if is_training:
            schedule = add_reduce(schedule, cut.placement)
    if config.offload_activations and not has_copies(schedule):
        schedule = add_copies(schedule, config.activation_loading_horizon)
    simulate(schedule, cut.placement, *edges)
    schedule = [*schedule, *([] for _ in range(config.pipeline_parallel_degree - len(schedule)))]
    return tuple(tuple(actions) for actions in schedule)


def simulate_step(cut: CutStep, schedule: tuple[tuple[Action, ...], ...], costs: Costs) -> Timeline:
    """When every action would run, in the unit of the costs, if messages do not hold ranks."""
    return simulate(schedule, cut.placement, *cut.edges, costs, rendezvous=False)


def describe_plan(
    plan: StepPlan, group: Sequence[int], pp_rank: int, machine: MachineModel
) -> dict[str, object]:
    """A plan and its estimated costs as plain data, for traces.

    Args:
        plan: what runs.
        group: global ranks of the pipeline.
        pp_rank: this rank, of whose stages it is known what they hold.
        machine: rates of the target.
    """
    cut = plan.cut
    forward, backward = cut.edges
    costs = stage_costs(cut, machine)
    assert isinstance(costs.transfer, Mapping), "estimates are for each edge"
    held = [*stage_bytes(plan.programs), *([StageBytes()] * len(cut.stages))][: len(cut.stages)]
    return {
        "ranks": list(group),
        "placement": list(cut.placement),
        "schedule": format_schedule(plan.schedule),
        "forward_edges": sorted(forward),
        "backward_edges": sorted(backward),
        "forward": costs.forward,
        "backward": costs.backward,
        "input_gradient": costs.input_gradient,
        "transfer": [(*edge, seconds) for edge, seconds in costs.transfer.items()],
        "copy": [one.moved / machine.host_bytes_per_s for one in held],
        "held_bytes": [after for _, after in held_over_time(plan.schedule[pp_rank], held)],
    }


def stage_costs(cut: CutStep, machine: MachineModel) -> Costs:
    """Estimated seconds of every stage's programs and of messages.

    Args:
        cut: the step in stages.
        machine: rates of the target.
    """
    forward_s, backward_s = [0.0] * len(cut.stages), [0.0] * len(cut.stages)
    for index, node in enumerate(cut.problem.nodes):
        for stage in cut.partition.stages_of(index):
            forward_s[stage] += cut.problem.forward_s[index]
            backward_s[stage] += node.cost.compute_s - cut.problem.forward_s[index]
    transfers = (*cut.forward, *cut.backward)
    seconds = {(t.source, t.target): t.num_bytes / machine.link_bytes_per_s for t in transfers}
    return Costs(
        forward=forward_s,
        backward=backward_s,
        transfer=seconds,
        input_gradient=[
            seconds * _share_of_inputs(stage)
            for stage, seconds in zip(cut.stages, backward_s, strict=True)
        ],
    )


def _share_of_inputs(stage: StageSpec) -> float:
    """How much of a backward is for the stage's inputs: products have two equal derivatives."""
    has_inputs = any(port.has_grad for port in stage.inputs)
    return has_inputs * (0.5 if stage.trained else 1.0)


def compile_stages(
    cut: CutStep,
    schedule: tuple[tuple[Action, ...], ...],
    pp_rank: int,
    backend: Backend,
    for_speed: bool = False,
    activation_memory: str | int = "keep",
    groups: Groups | None = None,
    shards: Mapping[str, FlatShard] | None = None,
    gradient_shards: Mapping[str, FlatShard] | None = None,
    max_live: int = 0,
    tell: Callable[[str], object] = lambda part: None,
    kept: KeptSteps | None = None,
) -> StepPlan:
    """Lowers and compiles the stages of one pipeline rank.

    Args:
        cut: the step in stages.
        schedule: actions of every pipeline rank.
        pp_rank: this rank.
        backend: compiles for this rank's device.
        for_speed: whether faster programs may take more memory (the key `optimize`).
        activation_memory: the key of the configuration.
        groups: those that stages communicate in.
        shards: of the parameters of which this rank has a part, by name.
        gradient_shards: of those whose gradients are divided; `shards` are among them.
        max_live: most elements of those that are to be whole at a time.
        tell: is told what begins, as in "stage 1 backward".
        kept: knows how stages were lowered in an earlier start.

    Raises:
        ConfigError: there is too little memory for activations.
        LoweringError: an operator can run neither on the device nor on the host.
    """

    def compile_(name: str, *arguments: Any) -> Executable:
        tell(name)
        return backend.compile(name, *arguments, groups=groups)

    own = [stage for stage in cut.stages if cut.placement[stage.index] == pp_rank]
    tell(f"lowering of stage {', '.join(str(stage.index) for stage in own)}")
    facts = (
        schedule[pp_rank],
        pp_rank,
        activation_memory,
        cut.step.is_training,
        for_speed and not gradient_shards,  # other layouts need whole weights, and gradients
    )

    def plan() -> dict[int, PlannedStage]:
        return plan_stages(
            own,
            *facts[:2],
            backend.lowering,
            *facts[2:],
            divided=shards or {},
            divide=lambda one: divide_stage(one, shards or {}, gradient_shards or {}, max_live),
        )

    is_divided = bool(shards or gradient_shards)
    planned = plan() if kept is None or is_divided else kept.planned(own, facts, plan)
    programs = {
        index: _compile_stage(stage, backend.lowering, compile_) for index, stage in planned.items()
    }
    return StepPlan(
        cut=cut,
        schedule=schedule,
        programs=programs,
        random_stages=tuple(i for i, p in programs.items() if p.forward.is_random),
        is_random=any(is_random(node) for node in cut.step.graph.nodes),
    )


def _compile_stage(stage: PlannedStage, lowering: Lowering, compile_: _Compile) -> CompiledStage:
    lowered = stage.lowered
    name = f"stage {lowered.spec.index}"
    forward = compile_(f"{name} forward", lowered.forward, lowered.forward_inputs)
    backward = None
    if stage.split is not None:
        return _compile_split(name, lowered, stage.split, forward, lowering, compile_)
    if lowered.backward is not None:
        # Its first arguments are the gradients so far, which its first results replace.
        donated = range(lowered.num_accumulators)
        inputs = lowered.backward_inputs
        graph = lowered.backward.flat(inputs, lowering.device)
        backward = compile_(f"{name} backward", graph, inputs, donated)
    prepare, finish = _compile_layout(name, lowered, lowering, compile_)
    return CompiledStage(lowered, forward, backward, prepare=prepare, finish=finish)


def _compile_layout(
    name: str, lowered: LoweredStage, lowering: Lowering, compile_: _Compile
) -> list[Executable | None]:
    """The programs at both ends of a step that change layouts; None for nothing to do."""
    weights = [lowered.forward_inputs[i] for i in lowered.transposed_weights]
    gradients = [lowered.backward_inputs[i] for i in lowered.transposed_gradients]
    found: list[Executable | None] = []
    for which, specs in (("prepare", weights), ("finish", gradients)):
        title = f"{name} {which}"
        graph = trace_program(title, transpose, specs, lowering) if specs else None
        found.append(None if graph is None else compile_(title, graph, specs))
    return found


def _compile_split(
    name: str,
    lowered: LoweredStage,
    split: SplitBackward,
    forward: Executable,
    lowering: Lowering,
    compile_: _Compile,
) -> CompiledStage:
    """Compiles a backward as two programs, of which either may be empty."""
    parts = [
        compile_(f"{name} {what} gradients", part.graph, part.inputs, range(count))
        if part is not None
        else None
        for what, part, count in (
            ("input", split.input_part, 0),
            ("weight", split.weight_part, lowered.num_accumulators),
        )
    ]
    layout = _compile_layout(name, lowered, lowering, compile_)
    return CompiledStage(lowered, forward, None, split, *parts, *layout)


def constant_tensors(cut: CutStep) -> dict[str, torch.Tensor]:
    """Values of the constants that the step captured, by name."""
    return {
        role.name: cut.step.constants[role.name]
        for role in cut.step.inputs
        if role.kind is InputKind.CONSTANT
    }
