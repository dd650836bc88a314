"""All that a rank needs to run a step: its schedule, and the compiled programs of its stages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch._ops import HigherOrderOperator

from mpxla.comm.transport import Groups
from mpxla.device.backend import Backend, Executable
from mpxla.graph.collectives import REPLICA_GROUP, is_collective
from mpxla.graph.cost import MachineModel
from mpxla.graph.stepgraph import is_random
from mpxla.runtime.executor import CompiledStage
from mpxla.runtime.plans.activations import PlannedStage, plan_stages, stage_bytes
from mpxla.runtime.plans.cut import CutStep
from mpxla.runtime.plans.kept_steps import KeptSteps
from mpxla.runtime.plans.scheduling import stage_costs
from mpxla.schedule.action import Schedule, format_schedule
from mpxla.schedule.analysis import StageBytes, held_over_time
from mpxla.stage.flat import SHARDING_GROUP, FlatShard
from mpxla.stage.layout import transpose
from mpxla.stage.piecewise import PiecewiseExecutable
from mpxla.stage.program import trace_program
from mpxla.stage.sharded import divide_stage, exchanges
from mpxla.stage.spec import TensorSpec

__all__ = ["StepPlan", "compile_stages", "describe_plan"]


_Compile = Callable[..., Executable]
"""`Backend.compile`, with signs of life."""


@dataclass(frozen=True)
class StepPlan:
    """What one rank runs for one signature.

    Programs and random stages are this rank's, actions those of every pipeline rank; it is random
    if any stage of the step is.
    """

    cut: CutStep
    schedule: Schedule
    programs: Mapping[int, CompiledStage]
    random_stages: tuple[int, ...]
    is_random: bool

    def messages(self, group: str) -> list[str]:
        """What programs exchange within a group while they run; all members must have the same."""
        programs = (p for stage in self.programs.values() for p in stage.programs)
        in_pieces = (p for p in programs if isinstance(p, PiecewiseExecutable))
        return [f"{p.name}: {line}" for p in in_pieces for line in p.plan.messages(group)]

    def exchanges(self) -> list[str]:
        """What this rank's programs gather, scatter and share with other replicas, in order."""
        lines: list[str] = []
        for index, stage in self.programs.items():
            backward = stage.lowered.backward
            graphs = {"forward": stage.lowered.forward.graph}
            if backward is not None:
                graphs["backward"] = backward.derivative.graph
            for which, graph in graphs.items():
                lines += [f"stage {index} {which} {line}" for line in exchanges(graph)]
        return [*lines, *self.messages(SHARDING_GROUP), *self.messages(REPLICA_GROUP)]


def compile_stages(
    cut: CutStep,
    schedule: Schedule,
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

    Stages take parts of the parameters in `shards`, of which `max_live` elements are to be whole at
    a time, and give parts of the gradients of those in `gradient_shards`, among which they are.
    `tell` is told what begins, as in "stage 1 backward".

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

    # A number of bytes is logged with what it leads to, in every start.
    is_new = bool(shards or gradient_shards) or isinstance(activation_memory, int)
    planned = plan() if kept is None or is_new else kept.planned(own, facts, plan)
    programs = {index: _compile_stage(stage, backend, compile_) for index, stage in planned.items()}
    return StepPlan(
        cut=cut,
        schedule=schedule,
        programs=programs,
        random_stages=tuple(i for i, p in programs.items() if p.forward.is_random),
        is_random=any(is_random(node) for node in cut.step.graph.nodes),
    )


def _compile_stage(stage: PlannedStage, backend: Backend, compile_: _Compile) -> CompiledStage:
    """A backward is one program, or two, of which either may be empty."""
    lowered, split, lowering = stage.lowered, stage.split, backend.lowering
    name, inputs = f"stage {lowered.spec.index}", lowered.backward_inputs
    # Their first arguments are the gradients so far, which their first results replace.
    donated = range(lowered.num_accumulators)
    forward = compile_(f"{name} forward", lowered.forward, lowered.forward_inputs)
    backward = input_part = weight_part = None
    if split is None and lowered.backward is not None:
        graph = lowered.backward.flat(inputs, lowering.device)
        backward = compile_(f"{name} backward", graph, inputs, donated)
    if split is not None and (part := split.input_part) is not None:
        input_part = compile_(f"{name} input gradients", part.graph, part.inputs)
    if split is not None and (part := split.weight_part) is not None:
        weight_part = compile_(f"{name} weight gradients", part.graph, part.inputs, donated)

    def transposed(which: str, specs: Sequence[TensorSpec]) -> Executable | None:
        """A program at one end of a step that changes layouts; None for nothing to do."""
        if not specs:
            return None
        title = f"{name} {which}"
        return compile_(title, trace_program(title, transpose, specs, lowering), specs)

    prepare = transposed("prepare", [lowered.forward_inputs[i] for i in lowered.transposed_weights])
    finish = transposed("finish", [inputs[i] for i in lowered.transposed_gradients])
    found = CompiledStage(
        lowered,
        split,
        forward=forward,
        backward=backward,
        input_part=input_part,
        weight_part=weight_part,
        prepare=prepare,
        finish=finish,
    )
    return replace(found, is_rehearsed=backend.builds_late and _runs_on_zeros(found))


def _runs_on_zeros(stage: CompiledStage) -> bool:
    """Whether programs take any values: none loops until one is right, or runs with other ranks."""
    forward, backward = stage.lowered.forward, stage.lowered.backward
    graphs = [forward.graph, *([] if backward is None else [backward.derivative.graph])]
    return not any(isinstance(p, PiecewiseExecutable) for p in stage.programs) and not any(
        isinstance(node.target, HigherOrderOperator) or is_collective(node)
        for graph in graphs
        for node in graph.nodes
    )


def describe_plan(
    plan: StepPlan, group: Sequence[int], pp_rank: int, machine: MachineModel
) -> dict[str, object]:
    """A plan and its estimated costs as plain data, for traces.

    Of this rank's stages it is known what they hold.
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
