"""The schedule of a step in stages, free of deadlock, and what its actions are estimated to cost.

This module must not know programs.
"""

from mpxla.config import Config
from mpxla.graph.cost import MachineModel
from mpxla.runtime.plans.cut import CutStep
from mpxla.schedule.action import Schedule
from mpxla.schedule.choice import compute_actions, custom_schedule
from mpxla.schedule.copies import add_copies, has_copies
from mpxla.schedule.lower import add_communication, add_reduce
from mpxla.schedule.simulate import Costs, simulate
from mpxla.stage.spec import StageSpec

__all__ = ["schedule_step", "stage_costs"]


def schedule_step(cut: CutStep, config: Config) -> Schedule:
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
            schedule = add_reduce(schedule)
    if config.offload_activations and not has_copies(schedule):
        schedule = add_copies(schedule, config.activation_loading_horizon)
    simulate(schedule, cut.placement, *edges)
    schedule = [*schedule, *([] for _ in range(config.pipeline_parallel_degree - len(schedule)))]
    return tuple(tuple(actions) for actions in schedule)


def stage_costs(cut: CutStep, machine: MachineModel) -> Costs:
    """Estimated seconds of every stage's programs and of messages."""
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
