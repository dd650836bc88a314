"""One call of an operator in a step of one or two stages, against plain PyTorch.

With two stages the operator stands in both: what the first one gives crosses to the second, and the
second one's arguments come from the first, so that gradients cross as well.
"""

import copy
import enum
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
import torch_xla
from torch import nn

from mpxla.device.torch_xla.compile import Executable
from mpxla.errors import MpxlaError
from mpxla.graph.stepgraph import is_random
from mpxla.tests.programs import host_operators
from mpxla.tests.sweep.local import LocalStep, StepValues
from mpxla.tests.sweep.samples import Case

__all__ = ["Outcome", "Status", "try_case"]

TOLERANCE = 1e-4
"""Largest difference in units of a tensor's largest element; about a tenth of it is used."""

FACTOR = 20
"""How many times plain PyTorch's own error in float32 an ill-conditioned operator may be off."""

FLOOR = 1e-2
"""Tensors with no larger element count as if they had this one."""


class Status(enum.StrEnum):
    """How a case went, from good to bad."""

    PASSED = "passed"
    HOST = "host"
    REFUSED = "refused"
    RAW = "raw"
    WRONG = "wrong"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Outcome:
    """How a case went.

    Attributes:
        case: operator, number of the sample and number of stages.
        status: what came of it.
        text: operators that ran on the host, the first lines of an error, or what was different.
    """

    case: str
    status: Status
    text: str = ""


class Call(nn.Module):
    """The operator, in a module of its own so that it can be put into a stage."""

    def __init__(self, case: Case):
        super().__init__()
        self._case = case
        self.function = case.function  # a module's parameters are the model's

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves, spec = pytree.tree_flatten(self._case.arguments)
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        value, arguments, keywords = pytree.tree_unflatten(filled, spec)
        result = self._case.process(self.function(value, *arguments, **keywords))
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


class Feed(nn.Module):
    """Arguments of the operator, computed of parameters so that their gradients are seen."""

    def forward(self, *parameters: torch.Tensor) -> list[torch.Tensor]:
        return [parameter * 1.0 for parameter in parameters]


class Weigh(nn.Module):
    """Sum of all elements with different weights: the loss."""

    def forward(self, *results: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for number, result in enumerate(results):
            if result.is_floating_point() and result.requires_grad:
                steps = torch.arange(result.numel(), dtype=torch.float32) + number
                total = total + (result * torch.cos(steps).reshape(result.shape)).sum()
        return total


class OneOperator(nn.Module):
    """Feeds an operator, once or twice, and weighs what it gives."""

    def __init__(self, case: Case, num_calls: int):
        super().__init__()
        leaves = pytree.tree_leaves(case.arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.is_trained = [t.requires_grad for t in tensors]
        self.trained = nn.ParameterList(
            nn.Parameter(t.detach().clone()) for t in tensors if t.requires_grad
        )
        self.feed, self.weigh = Feed(), Weigh()
        self.calls = nn.ModuleList(Call(case) for _ in range(num_calls))

    def forward(self, *plain: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        results: list[torch.Tensor] = []
        fed = self.feed(*self.trained)
        for call in self.calls:
            trained, rest = iter(fed), iter(plain)
            results += call(*(next(trained if flag else rest) for flag in self.is_trained))
        return self.weigh(*results), results


def run(model: OneOperator, *plain: torch.Tensor) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """One step: what is differentiated (None if nothing depends on parameters), and results."""
    loss, results = model(*plain)
    return (loss if loss.requires_grad else None), results


def try_case(case: Case, num_stages: int) -> Outcome:
    """Runs a case as a step of one or two stages, and compares with plain PyTorch."""
    name = f"{case.operator}[{case.number}] on {num_stages}"
    model = OneOperator(case, num_stages)
    leaves = [t for t in pytree.tree_leaves(case.arguments) if isinstance(t, torch.Tensor)]
    plain = [t.detach().clone() for t in leaves if not t.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected, again = (_plain_step(model, plain, seed) for seed in (1, 2))
        except Exception as error:  # whatever the sample does in plain PyTorch, it is no fault here
            return Outcome(name, Status.SKIPPED, f"plain PyTorch: {_first_lines(error)}")
        try:
            step = LocalStep(model, plain, run, _pins(num_stages), num_stages)
            found = step.run()
        except MpxlaError as error:
            _forget_pending()
            return Outcome(name, Status.REFUSED, _first_lines(error))
        except Exception as error:  # every other error is a finding
            _forget_pending()
            return Outcome(name, Status.RAW, f"{type(error).__name__}: {_first_lines(error)}")
    # Some samples set a seed themselves: plain PyTorch then repeats its numbers.
    draws = any(is_random(node) for node in step.cut.step.graph.nodes)
    draws = draws or bool(_differences(again, expected, lambda key: 0.0))
    if draws or not case.is_defined:
        wrong = _differences(found, expected, None)
    else:
        wrong = _differences(found, expected, _own_error(model, plain, expected))
    if wrong:
        return Outcome(name, Status.WRONG, "; ".join(wrong))
    programs = [program for stage in step.programs.values() for program in stage.programs]
    host = sorted({operator for program in programs for operator in host_operators(program)})
    return Outcome(name, Status.HOST if host else Status.PASSED, ", ".join(host))


def _pins(num_stages: int) -> dict[str, int]:
    return {"calls.1": 1, "weigh": 1} if num_stages == 2 else {}


def _plain_step(model: OneOperator, plain: Sequence[torch.Tensor], seed: int) -> StepValues:
    """The step in plain PyTorch."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss, results = run(model, *plain)
    if loss is not None:
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return StepValues(tuple(r.detach() for r in results), gradients, {})


_Bound = Callable[[str], float]


def _own_error(model: OneOperator, plain: Sequence[torch.Tensor], expected: StepValues) -> _Bound:
    """How far plain PyTorch in float32 is from itself in float64, by the name of a value."""

    @functools.cache
    def precise() -> dict[str, torch.Tensor]:
        doubles = [t.double() if t.dtype is torch.float32 else t for t in plain]
        try:
            return _named(_plain_step(copy.deepcopy(model).double(), doubles, 1))
        except RuntimeError:  # not everything takes float64
            return {}

    def bound(name: str) -> float:
        value, exact = _named(expected)[name], precise().get(name)
        if exact is None or exact.shape != value.shape:
            return 0.0
        return FACTOR * torch.nan_to_num(value.double() - exact, 0, 0, 0).abs().max().item()

    return bound


def _named(values: StepValues) -> dict[str, torch.Tensor]:
    results = {f"result {i}": value for i, value in enumerate(values.results)}
    return results | {f"gradient of {name}": g for name, g in values.gradients.items()}


def _differences(found: StepValues, expected: StepValues, bound: _Bound | None) -> list[str]:
    """What is different; without `bound`, shapes and dtypes only."""
    actual, wanted = _named(found), _named(expected)
    texts = []
    for name in sorted({*actual, *wanted}):
        got, want = actual.get(name), wanted.get(name)
        if got is None or want is None:
            given = want if got is None else got
            if name.startswith("result") or given.abs().nan_to_num(1).sum() > 0:
                texts.append(f"{name} is {'missing' if got is None else 'too many'}")
        elif got.shape != want.shape or got.dtype != want.dtype:
            texts.append(f"{name} is {got.dtype}{[*got.shape]}, not {want.dtype}{[*want.shape]}")
        elif bound is not None and want.numel():
            difference = _difference(got, want)
            if difference > TOLERANCE and difference > bound(name) / _scale(want):
                texts.append(f"{name} is off by {difference:.1e}")
    return texts


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference in units of the largest finite element; infinite if others differ."""
    if not want.is_floating_point() and not want.is_complex():
        return 0.0 if torch.equal(got, want) else torch.inf
    is_finite = torch.isfinite(want)
    if not torch.equal(
        torch.where(is_finite, 0, got).nan_to_num(7), torch.where(is_finite, 0, want).nan_to_num(7)
    ):
        return torch.inf
    difference = torch.where(is_finite, got - want, 0).abs().max().item()
    return torch.inf if difference != difference else difference / _scale(want)


def _scale(want: torch.Tensor) -> float:
    finite = torch.where(torch.isfinite(want), want, 0)
    return max(finite.abs().max().item(), FLOOR)


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().split("\n") if line.strip()]
    return " ".join(lines[:2])[:300]


def _forget_pending() -> None:
    """Drops what a failed trace has left behind, and the ticket that a failed program kept."""
    Executable.next_ticket = None
    torch_xla._XLAC._clear_pending_irs("xla:0")
