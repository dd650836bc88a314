"""One training step in stages, run by hand in one process: capture, cut, lower, compile, call.

What ranks add (messages, schedules, optimizers) is left out, so that many models can be tried.
Call it in a process that may touch the XLA device, such as a rank of `run_ranks`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from mpxla.device.torch_xla.lowering import make_lowering

__all__ = ["Outcome", "differences", "run_in_stages", "run_plainly"]


@dataclass
class Outcome:
    """What one step gives: the differentiated loss, gradients and changed buffers by name."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    num_stages: int = 1


def run_plainly(model: nn.Module, loss_of: Callable[..., Any], batch: Mapping[str, Any]) -> Outcome:
    """One step of the plain model, on the host."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss = loss_of(model, batch)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    changed = {n: b.clone() for n, b in model.named_buffers() if not torch.equal(b, before[n])}
    model.zero_grad()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return Outcome(loss.item(), grads, changed)


def run_in_stages(
    model: nn.Module,
    loss_of: Callable[..., Any],
    batch: Mapping[str, Any],
    num_stages: int = 2,
    memory_weight: float = 0.0,
) -> Outcome:
    """The same step, captured and cut into stages.

    Args:
        model: holds the values; nothing is changed.
        loss_of: (model, batch) -> the scalar to differentiate.
        batch: inputs of the step, in a mapping.
        num_stages: into how many stages the step is cut.
        memory_weight: key of the configuration; above 0 what stages save is looked at, too.
    """
    from mpxla.cli.factory import capture_factory
    from mpxla.config import Config
    from mpxla.runtime.plan import cut_step

    def step(model, batch):
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    graph = capture_factory(model, (dict(batch),), step)
    keys = {"pipeline_parallel_degree": num_stages, "memory_weight": memory_weight}
    cut = cut_step(graph, Config(**keys), make_lowering(True), {}, None)
    run = _Run(model, cut, [v for v in pytree.tree_leaves(batch) if isinstance(v, torch.Tensor)])
    for stage in cut.stages:
        run.forward(stage)
    for stage in reversed(cut.stages):
        run.backward(stage)
    (loss,) = [value for value in run.results.values() if value.numel() == 1][:1]
    return Outcome(loss.item(), run.gradients, run.buffers, len(cut.stages))


def differences(plain: Outcome, staged: Outcome, tolerance: float = 1e-4) -> str:
    """What differs between two outcomes, in words; empty if nothing does.

    Gradients are compared by their norms. A parameter may have a gradient of zeros in one outcome
    and none in the other.
    """
    found: list[str] = []
    if abs(plain.loss - staged.loss) > tolerance * abs(plain.loss):
        found.append(f"loss {staged.loss} for {plain.loss}")
    scale = max((g.norm().item() for g in plain.gradients.values()), default=0.0)
    for name in dict.fromkeys([*plain.gradients, *staged.gradients]):
        right, other = plain.gradients.get(name), staged.gradients.get(name)
        right = torch.zeros_like(other) if right is None else right
        other = torch.zeros_like(right) if other is None else other
        off = (other - right).norm().item()
        # What is zero but for rounding (the bias in front of a norm, say) has no digits.
        if not off <= tolerance * max(right.norm().item(), 1e-3 * scale):
            found.append(f"gradient of {name} off by {off:.3g} of {right.norm().item():.3g}")
    if set(plain.buffers) != set(staged.buffers):
        found.append(f"changes {sorted(staged.buffers)} for {sorted(plain.buffers)}")
    return "; ".join(found)


class _Run:
    """Values of one step on the host, by their names in the step's graph."""

    def __init__(self, model: nn.Module, cut: Any, leaves: Sequence[torch.Tensor]):
        from mpxla.runtime.plan import constant_tensors
        from mpxla.runtime.state import ModelState

        names = ModelState(model).canonical_names
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        self.state = {names[name]: tensor.detach() for name, tensor in tensors}
        self.state.update(constant_tensors(cut))
        self.leaves = leaves
        self.values: dict[str, torch.Tensor] = {}
        self.gradients_of: dict[tuple[str, int], torch.Tensor] = {}
        self.saved: dict[int, Any] = {}
        self.results: dict[int, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}

    def forward(self, spec: Any) -> None:
        from mpxla.stage.lower import lower_stage

        lowered = lower_stage(spec, True, make_lowering(True))
        held = [self.state[n] for n in (*spec.parameters, *spec.buffers, *spec.constants)]
        read = [self.values[p.name] if p.leaf < 0 else self.leaves[p.leaf] for p in spec.inputs]
        arguments = [*held, *read]
        found = _call("forward", lowered.forward, lowered.forward_inputs, arguments)
        rest = iter(found)
        self.values.update((port.name, next(rest)) for port in spec.outputs)
        self.results.update((index, next(rest)) for index in spec.results)
        self.buffers.update((name, next(rest)) for name in spec.new_buffers)
        kept = list(rest)
        saved = [
            arguments[s.argument] if s.output is None else kept[s.output] for s in lowered.saved
        ]
        self.saved[spec.index] = (lowered, saved)

    def backward(self, spec: Any) -> None:
        lowered, saved = self.saved[spec.index]
        if lowered.backward is None:
            return
        grads = [
            self.gradients_of[spec.outputs[output].name, stage]
            for output, stage in lowered.grad_ports
        ]
        sums = [torch.zeros_like(self.state[name]) for name in spec.trained]
        arguments = [*sums, *saved, *grads, torch.tensor(1.0)]
        found = _call("backward", lowered.backward, lowered.backward_inputs, arguments)
        for name, grad in zip(spec.trained, found, strict=False):
            self.gradients[name] = self.gradients.get(name, 0) + grad
        ports = [port for port in spec.inputs if port.has_grad]
        for port, grad in zip(ports, found[len(spec.trained) :], strict=True):
            self.gradients_of[port.name, spec.index] = grad


def _call(
    name: str, module: nn.Module, inputs: Sequence[Any], arguments: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Compiles a program, runs it once, and brings its results to the host."""
    from mpxla.device.torch_xla.compile import compile_graph
    from mpxla.device.torch_xla.tensors import current_device, to_device, to_host

    device = current_device()
    for spec, given in zip(inputs, arguments, strict=True):
        assert (spec.shape, spec.dtype) == (tuple(given.shape), given.dtype), name
    program = compile_graph(name, module, inputs, device)
    seed = to_device([torch.tensor(7)], device)[0]
    return to_host(program(to_device(arguments, device), seed))
