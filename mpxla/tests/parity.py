"""Training the same model with mpxla on several ranks and with plain PyTorch in one process.

`train` runs on every rank and observes everything that the tests compare; `train_plainly` is the
reference, which splits its batches into the same microbatches and averages their gradients. The
reference runs in the test process, so it shares no state with what it judges.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from mpxla.tests.models import Batch, Subject, subject

__all__ = [
    "NUM_STEPS",
    "Case",
    "Observed",
    "Plain",
    "Reference",
    "batch_of",
    "train",
    "train_plainly",
]

NUM_STEPS = 5
SAMPLES_PER_MICROBATCH = 2
_SEED = 20


@dataclass(frozen=True)
class Case:
    """One way to train one subject."""

    subject: str
    stages: int
    microbatches: int
    pipeline: str = "interleaved"
    manual: bool = False
    keys: tuple[tuple[str, Any], ...] = ()
    """Further configuration keys."""

    def __str__(self) -> str:
        placing = "manual" if self.manual else "auto"
        more = "".join(f"-{name}" for name, _ in self.keys)
        return f"{self.subject}-{self.stages}x{self.microbatches}-{self.pipeline}-{placing}{more}"

    def config(self) -> dict[str, Any]:
        """What `smp.init` is given."""
        return {
            "pipeline_parallel_degree": self.stages,
            "microbatches": self.microbatches,
            "pipeline": self.pipeline,
            "auto_partition": not self.manual,
            # Cuts that weigh memory lower the step once more, and have tests of their own.
            **({"default_partition": 0} if self.manual else {"memory_weight": 0.0}),
            **dict(self.keys),
        }


@dataclass
class Reference:
    """What the plain model does.

    `outputs` are the leaves that the first step returns: for each a list over microbatches.
    """

    adam_losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: list[list[Any]] = field(default_factory=list)


@dataclass
class Observed(Reference):
    """What one rank sees; `gradients` and `state` are of its own parameters and buffers.

    Attributes:
        names: canonical names of all parameters of the model.
        absent: names of parameters without storage on this rank.
        placement: pipeline rank of every stage.
        with_backward: stages that have one; a stage after the loss, say of outputs, has none.
        peaks: most microbatches with saved values, by stage, over all steps.
        first_compilations: programs compiled by the first step call.
        later_compilations: by all step calls after it.
        optimizer_compilations: by every optimizer step of SGD, then of AdamW.
    """

    names: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    placement: tuple[int, ...] = ()
    with_backward: tuple[int, ...] = ()
    peaks: dict[int, int] = field(default_factory=dict)
    first_compilations: int = 0
    later_compilations: int = 0
    optimizer_compilations: list[int] = field(default_factory=list)


def batch_of(chosen: Subject, step: int, microbatches: int) -> Batch:
    """The data of one step: the same on every call."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1000 + step)
        return chosen.batch(microbatches * SAMPLES_PER_MICROBATCH)


def build(chosen: Subject) -> nn.Module:
    """The model with its initial values: the same on every call."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        return chosen.build()


# --- plain --------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A model with the interface that step functions use, in one process.

    Args:
        module: the model.
        num_microbatches: what gradients are divided by.
    """

    def __init__(self, module: nn.Module, num_microbatches: int):
        super().__init__()
        self.module = module
        self._num_microbatches = num_microbatches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, tensor: torch.Tensor, grad: torch.Tensor | None = None) -> None:
        scale = torch.ones_like(tensor) if grad is None else grad
        tensor.backward(scale / self._num_microbatches, retain_graph=True)


def step_plainly(chosen: Subject, model: Plain, batch: Batch, count: int) -> list[Any]:
    """One step, microbatch by microbatch; returns what the step function returned for each."""
    parts = {name: tensor.chunk(count) for name, tensor in batch.items()}
    returned = [chosen.step(model, {n: p[i] for n, p in parts.items()}) for i in range(count)]
    return [pytree.tree_map(_detached, value) for value in returned]


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def train_plainly(case: Case) -> Reference:
    """The reference of a case."""
    chosen, found = subject(case.subject), Reference()
    model = Plain(build(chosen), case.microbatches)
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.learning_rate)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batch = batch_of(chosen, step, case.microbatches)
        returned = step_plainly(chosen, model, batch, case.microbatches)
        if step == 0:
            leaves = [pytree.tree_leaves(value) for value in returned]
            found.outputs = [list(values) for values in zip(*leaves, strict=True)]
            found.gradients = {n: p.grad.clone() for n, p in model.module.named_parameters()}
        optimizer.step()
    found.state = {n: v.detach().clone() for n, v in model.module.state_dict().items()}
    model = Plain(build(chosen), case.microbatches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.learning_rate / 10)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batch = batch_of(chosen, step, case.microbatches)
        returned = step_plainly(chosen, model, batch, case.microbatches)
        found.adam_losses.append(torch.stack([value["loss"] for value in returned]).mean().item())
        optimizer.step()
    return found


# --- on the ranks -------------------------------------------------------------------------------


def train(case: Case) -> Observed:
    """Trains with SGD, puts the start values back, and trains with AdamW. Runs on every rank."""
    import mpxla as smp

    chosen = subject(case.subject)
    smp.init(case.config())
    raw = build(chosen)
    start = {name: value.clone() for name, value in raw.state_dict().items()}
    model = smp.DistributedModel(raw)
    if case.manual:
        for path, rank in _places(chosen, raw, case.stages).items():
            smp.set_partition(raw.get_submodule(path), rank)
    run = _Run(case, chosen, model, smp.step(chosen.step), Observed())
    run.train(torch.optim.SGD(raw.parameters(), lr=chosen.learning_rate), run.look_at_first_step)
    found = run.found
    state = model.local_state_dict()
    found.state = {n: v.cpu().clone() for n, v in state.items() if torch.is_tensor(v)}
    found.names = [name for name, _ in raw.named_parameters()]
    found.absent = [name for name, p in raw.named_parameters() if p.device.type == "meta"]
    model.load_state_dict(start)
    adam = torch.optim.AdamW(raw.parameters(), lr=chosen.learning_rate / 10)
    run.train(adam, run.note_loss)
    return found


def _places(chosen: Subject, raw: nn.Module, stages: int) -> dict[str, int]:
    """Module path -> rank: those of the subject, or else one rank after the other."""
    if stages == 1 + max(chosen.manual.values()):
        return dict(chosen.manual)
    owners = [path for path, m in raw.named_modules() if list(m.parameters(recurse=False))]
    paths = [path for path in owners if not list(raw.get_submodule(path).children())]
    return {path: number * stages // len(paths) for number, path in enumerate(paths)}


@dataclass
class _Run:
    """One rank's training, and what is seen on the way."""

    case: Case
    chosen: Subject
    model: Any
    step: Callable[..., Any]
    found: Observed

    def train(self, inner: torch.optim.Optimizer, look: Callable[[int, Any], None]) -> None:
        """Trains with an optimizer; `look(step number, returned)` comes before its update."""
        import mpxla as smp
        from mpxla.session import current

        def num_compilations() -> int:
            return current().backend.num_compilations

        optimizer = smp.DistributedOptimizer(inner)
        for number in range(NUM_STEPS):
            optimizer.zero_grad()
            before = num_compilations()
            returned = self.step(self.model, self._data(number))
            compiled = num_compilations() - before
            if self.found.names or number:
                self.found.later_compilations += compiled
            else:
                self.found.first_compilations = compiled
            for stage, peak in self.model.last_run.values.peak_in_flight.items():
                self.found.peaks[stage] = max(peak, self.found.peaks.get(stage, 0))
            look(number, returned)
            before = num_compilations()
            optimizer.step()
            self.found.optimizer_compilations.append(num_compilations() - before)

    def _data(self, number: int) -> Batch:
        """The batch on the first rank of the pipeline; dummies elsewhere, as scripts do."""
        import mpxla as smp

        batch = batch_of(self.chosen, number, self.case.microbatches)
        if smp.pp_rank() == 0:
            return batch
        return {name: torch.zeros(value.shape[0], 0) for name, value in batch.items()}

    def look_at_first_step(self, number: int, returned: Any) -> None:
        if number > 0:
            return
        leaves = pytree.tree_leaves(returned, is_leaf=_is_list_of_numbers)
        self.found.outputs = [_over_microbatches(leaf, self.case.microbatches) for leaf in leaves]
        self.found.gradients = {
            name: parameter.grad.cpu().clone()
            for name, parameter in self.model.local_named_parameters()
        }
        cut = self.model._engine.first_cuts[self.model.label]
        self.found.placement = cut.placement
        self.found.with_backward = tuple(s for s, one in enumerate(cut.stages) if one.has_backward)

    def note_loss(self, number: int, returned: Any) -> None:
        self.found.adam_losses.append(returned["loss"].reduce_mean().item())


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, (bool, int, float)) for v in value)


def _over_microbatches(leaf: Any, count: int) -> list[Any]:
    if isinstance(leaf, list):
        return leaf
    if hasattr(leaf, "outputs"):
        return [value.cpu() for value in leaf.outputs]
    return [leaf] * count
