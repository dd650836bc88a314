"""One training step in stages, run by hand in one process: capture, cut, lower, compile, call.

What ranks add (messages, schedules, optimizers) is left out, so that many models can be tried.
Call it in a process that may touch the XLA device, such as a rank of `run_ranks`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from mpxla.tests.backends import backend_here

__all__ = ["Outcome", "differences", "rounding_errors", "run_in_stages", "run_plainly"]

FACTOR = 4
"""Times its own rounding error, by which a value may be off where that is much."""


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
    from mpxla.runtime.plans.cut import cut_step

    def step(model, batch):
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    graph = capture_factory(model, (dict(batch),), step)
    keys = {"pipeline_parallel_degree": num_stages, "memory_weight": memory_weight}
    cut = cut_step(graph, Config(**keys), backend_here().lowering, {}, None)
    run = _Run(model, cut, [v for v in pytree.tree_leaves(batch) if isinstance(v, torch.Tensor)])
    for stage in cut.stages:
        run.forward(stage)
    for stage in reversed(cut.stages):
        run.backward(stage)
    (loss,) = [value for value in run.results.values() if value.numel() == 1][:1]
    return Outcome(loss.item(), run.gradients, run.buffers, len(cut.stages))


def differences(
    plain: Outcome,
    staged: Outcome,
    tolerance: float = 1e-4,
    rounding: Mapping[str, float] | None = None,
) -> str:
    """What differs between two outcomes, in words; empty if nothing does.

    Values are compared by their norms. A parameter may have a gradient of zeros in one outcome
    and none in the other.

    Args:
        plain: the right one.
        staged: the other.
        tolerance: relative error that is allowed everywhere.
        rounding: what `rounding_errors` gives; each value may be off by FACTOR times its own, too.
    """
    found: list[str] = []
    if set(plain.buffers) != set(staged.buffers):
        found.append(f"changes {sorted(staged.buffers)} for {sorted(plain.buffers)}")
    scale = max((g.norm().item() for g in plain.gradients.values()), default=0.0)
    rights, others = _named(plain), _named(staged)
    for name in dict.fromkeys([*rights, *others]):
        off, size = _distance(rights.get(name), others.get(name))
        # What is zero but for rounding (the bias in front of a norm, say) has no digits.
        floor = 1e-3 * scale if name.startswith("gradient") else 0.0
        allowed = max(tolerance * max(size, floor), FACTOR * (rounding or {}).get(name, 0.0))
        if not off <= allowed:
            found.append(f"{name} off by {off:.3g} of {size:.3g}")
    return "; ".join(found)


def rounding_errors(
    model: nn.Module, loss_of: Callable[..., Any], batch: Mapping[str, Any]
) -> dict[str, float]:
    """How far plain float32 is from float64, by the name of a value; empty if float64 fails.

    A model can be so ill-conditioned that no order of additions gives more digits. The larger of
    two errors counts, since one can be small by chance: that of the step, and that of the step with
    every number moved to a neighbor or left alone.
    """
    exact = copy.deepcopy(model).double()
    torch.set_default_dtype(torch.float64)
    try:
        right = _named(run_plainly(exact, loss_of, _changed(batch, torch.Tensor.double)))
    except RuntimeError:  # not everything takes float64
        return {}
    finally:
        torch.set_default_dtype(torch.float32)
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.copy_(_neighbor(parameter, generator))
    near = _changed(batch, lambda value: _neighbor(value, generator))
    steps = [run_plainly(model, loss_of, batch), run_plainly(moved, loss_of, near)]
    values = [_named(step) for step in steps]
    return {n: max(_distance(v, given.get(n))[0] for given in values) for n, v in right.items()}


def _named(outcome: Outcome) -> dict[str, torch.Tensor]:
    values = {"loss": torch.tensor(outcome.loss, dtype=torch.float64)}
    values.update((f"gradient of {name}", value) for name, value in outcome.gradients.items())
    values.update((f"buffer {name}", value) for name, value in outcome.buffers.items())
    return values


def _distance(right: torch.Tensor | None, other: torch.Tensor | None) -> tuple[float, float]:
    """Norms of the difference and of what is right; None stands for zeros."""
    zero = torch.zeros((), dtype=torch.float64)
    right, other = (zero if value is None else value.double() for value in (right, other))
    return (other - right).norm().item(), right.norm().item()


def _neighbor(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Half of the numbers are moved to the next larger one."""
    is_moved = torch.rand(values.shape, generator=generator) < 0.5
    return torch.where(is_moved, values.nextafter(torch.full_like(values, torch.inf)), values)


def _changed(batch: Mapping[str, Any], change: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """The batch with its floating-point tensors changed."""

    def changed(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return change(value) if is_float else value

    return pytree.tree_map(changed, dict(batch))


class _Run:
    """Values of one step on the host, by their names in the step's graph."""

    def __init__(self, model: nn.Module, cut: Any, leaves: Sequence[torch.Tensor]):
        from mpxla.runtime.state import ModelState

        names = ModelState(model).canonical_names
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        self.state = {names[name]: tensor.detach() for name, tensor in tensors}
        self.state.update(cut.step.constants)
        self.leaves = leaves
        self.values: dict[str, torch.Tensor] = {}
        self.gradients_of: dict[tuple[str, int], torch.Tensor] = {}
        self.saved: dict[int, Any] = {}
        self.results: dict[int, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}

    def forward(self, spec: Any) -> None:
        from mpxla.stage.lower import TracedStage

        lowered = TracedStage(spec, True, backend_here().lowering).lowered()
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
        inputs = lowered.backward_inputs
        graph = lowered.backward.flat(inputs, backend_here().lowering.device)
        found = _call("backward", graph, inputs, arguments)
        for name, grad in zip(spec.trained, found, strict=False):
            self.gradients[name] = self.gradients.get(name, 0) + grad
        ports = [port for port in spec.inputs if port.has_grad]
        for port, grad in zip(ports, found[len(spec.trained) :], strict=True):
            self.gradients_of[port.name, spec.index] = grad


def _call(
    name: str, graph: fx.GraphModule, inputs: Sequence[Any], arguments: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Compiles a program, runs it once, and brings its results to the host."""
    backend = backend_here()
    for spec, given in zip(inputs, arguments, strict=True):
        assert (spec.shape, spec.dtype) == (tuple(given.shape), given.dtype), name
    program = backend.compile(name, graph, inputs)
    (seed,) = backend.put([torch.tensor(7)])
    return backend.get(program(backend.put(arguments), seed))
