"""A step cut into stages: partitioned, or as an earlier partition has it, and split.

This module must not know how stages are compiled or run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mpxla.config import Config
from mpxla.device.backend import Lowering
from mpxla.graph.cost import MachineModel, PartitionProblem, build_problem
from mpxla.graph.partition.auto import partition_auto
from mpxla.graph.partition.manual import partition_manual
from mpxla.graph.partition.words import Partition, SavedTensor
from mpxla.graph.placement import rank_of
from mpxla.graph.regions import check_regions
from mpxla.graph.split import backward_transfers, forward_transfers, split_stages
from mpxla.graph.stepgraph import StepGraph
from mpxla.log import warn_once
from mpxla.runtime.plans.partition_store import read_decision
from mpxla.runtime.saved import saved_tensors
from mpxla.schedule.choice import in_flight, paces, placement_of
from mpxla.schedule.dataflow import Edge
from mpxla.stage.spec import StageSpec, TensorSpec, Transfer

__all__ = ["CutStep", "cut_step", "weighs_memory"]


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
        """Pipeline ranks that hold each parameter or buffer that the step reads or changes."""
        holders: dict[str, set[int]] = {}
        for stage in self.stages:
            for name in (*stage.parameters, *stage.buffers, *stage.new_buffers):
                holders.setdefault(name, set()).add(self.placement[stage.index])
        return {name: tuple(sorted(ranks)) for name, ranks in holders.items()}

    def result_specs(self) -> dict[int, TensorSpec]:
        """Spec of each result of the step."""
        return {
            index: spec
            for stage in self.stages
            for index, spec in zip(stage.results, stage.result_specs, strict=True)
        }

    def description(self) -> list[str]:
        """Lines that are equal on two ranks if they cut the same step in the same way."""
        lines = self.step.lines_of_flags
        for stage in self.stages:
            where = f"stage {stage.index} of partition {self.placement[stage.index]}"
            lines += [f"{node.format_node()} in {where}" for node in stage.graph.nodes]
            lines += [f"{where} with {held}" for held in (stage.parameters, stage.trained)]
            lines.append(f"{where} with {stage.buffers}")
            lines += [f"{where} with {port}" for port in (*stage.inputs, *stage.outputs)]
        return lines


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
    twins: Mapping[str, str] | None = None,
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
        twins: parameters of copies of trained modules, with those of their originals.

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
            may_be_fewer=step.is_question,
            twins=twins,
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
