"""A lowered stage with stages before and after it, for tests of what is done to stages."""

import torch
from torch import nn

from mpxla.tests.backends import backend_here


def middle_stage(module, shape, for_speed=False):
    """The stage in the middle of three, which has inputs with gradients and parameters."""
    from mpxla.config import Config
    from mpxla.graph.capture.step import ToCapture, capture_step
    from mpxla.runtime.plans.cut import cut_step
    from mpxla.stage.lower import TracedStage

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(shape[-1], shape[-1])
            self.middle = module
            self.last = nn.Linear(5 if isinstance(module, nn.Sequential) else 16, 1)

        def forward(self, x):
            return self.last(self.middle(torch.tanh(self.first(x)))).sum()

    model = Model()
    objects = {name: name for name in dict(model.named_parameters())}

    def step(leaves):
        from mpxla.graph.capture.recorder import current_recorder

        loss = model(*leaves)
        current_recorder().backward(loss, None)
        return loss

    leaf = torch.zeros(shape)
    graph = capture_step(
        ToCapture(step, model, [leaf], objects | {n: n for n, _ in model.named_buffers()})
    )
    pins = {"model.first": 0, "model.middle": 1, "model.last": 2}
    config = Config(pipeline_parallel_degree=3, auto_partition=False, default_partition=0)
    cut = cut_step(graph, config, backend_here().lowering, pins, None)
    return TracedStage(cut.stages[1], True, backend_here().lowering, for_speed).lowered()
