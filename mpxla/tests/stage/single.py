"""One stage, lowered, compiled and run once without a session, next to plain PyTorch."""

from collections.abc import Callable

import torch
from torch import nn

from mpxla.tests.backends import backend_here
from mpxla.tests.programs import host_operators

__all__ = ["differences"]


class _Model(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], width: int):
        super().__init__()
        self.function, self.linear = function, nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def differences(
    function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...] = (4, 6)
) -> tuple[list[float], tuple[str, ...]]:
    """Runs a function of a linear layer's result forward and backward, both ways.

    Returns:
        How far loss and gradient of the weight are off, relative to their largest element, and the
        operators that ran on the host.
    """
    from mpxla.runtime.plans.activations import PlannedStage
    from mpxla.runtime.plans.plan import _compile_stage

    torch.manual_seed(0)
    x = torch.randn(shape)
    model = _Model(function, shape[-1])
    lowered, constants = _lowered(model, x)
    loss = model(x).float().sum()
    loss.backward()
    known = {"linear.weight": model.linear.weight, "linear.bias": model.linear.bias, **constants}
    backend = backend_here()
    stage = _compile_stage(PlannedStage(lowered), backend, backend.compile)
    spec = lowered.spec
    values = [known[n].detach() for n in (*spec.parameters, *spec.constants)]
    values += [x for _ in spec.inputs]
    zeros = [torch.zeros(s.shape) for s in lowered.backward_inputs[: lowered.num_accumulators]]
    *arguments, one = backend.put([*values, *zeros, torch.ones(())])
    arguments, accumulators = arguments[: len(values)], arguments[len(values) :]
    outputs = stage.forward(arguments)
    kept = outputs[len(outputs) - lowered.num_saved :]
    saved = [arguments[s.argument] if s.output is None else kept[s.output] for s in lowered.saved]
    gradients = stage.backward([*accumulators, *saved, one])
    weight = gradients[spec.trained.index("linear.weight")]
    found = backend.get([outputs[0], weight])
    pairs = zip(found, (loss.detach(), model.linear.weight.grad), strict=True)
    errors = [((a - b).abs().max() / b.abs().max().clamp(min=1e-9)).item() for a, b in pairs]
    return errors, (*host_operators(stage.forward), *host_operators(stage.backward))


def _lowered(model, x):
    from mpxla.config import Config
    from mpxla.graph.capture.recorder import current_recorder
    from mpxla.graph.capture.step import ToCapture, capture_step
    from mpxla.runtime.plans.cut import cut_step
    from mpxla.stage.lower import TracedStage

    def step(leaves):
        loss = model(*leaves).float().sum()
        current_recorder().backward(loss, None)
        return loss

    names = {name: name for name, _ in model.named_parameters()}
    graph = capture_step(ToCapture(step, model, [x], names))
    config = Config(pipeline_parallel_degree=1, auto_partition=False, default_partition=0)
    lowering = backend_here().lowering
    cut = cut_step(graph, config, lowering, {}, None)
    return TracedStage(cut.stages[0], True, lowering).lowered(), graph.constants
