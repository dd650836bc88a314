"""Small steps, captured and cut, for tests on the null backend."""

import torch
from torch import nn

from mpxla.config import Config
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import ToCapture, capture_step
from mpxla.runtime.plans.cut import cut_step
from mpxla.runtime.plans.plan import StepPlan, compile_stages
from mpxla.runtime.plans.scheduling import schedule_step
from mpxla.tests.device.null import NullBackend

NUM_MICROBATCHES = 3


def two_layers():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def plan_of(
    backend: NullBackend, pp_rank: int = 0, num_stages: int = 1, is_training: bool = True, **keys
) -> StepPlan:
    """The plan of one rank for a step of `two_layers`, whose result is the loss.

    With two stages, the second linear layer is the second stage.
    """
    model = two_layers()

    def step(leaves):
        loss = model(*leaves).square().mean()
        if is_training:
            current_recorder().backward(loss, None)
        return loss

    names = {name: name for name in dict(model.named_parameters())}
    graph = capture_step(ToCapture(step, model, [torch.zeros(3, 4)], names))
    config = Config(
        pipeline_parallel_degree=num_stages,
        microbatches=NUM_MICROBATCHES,
        auto_partition=False,
        default_partition=0,
        **keys,
    )
    pins = {"model.2": 1} if num_stages > 1 else {}
    cut = cut_step(graph, config, backend.lowering, pins, None)
    return compile_stages(cut, schedule_step(cut, config), pp_rank, backend)
