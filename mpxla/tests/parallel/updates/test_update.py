"""Compiled updates against the same optimizer on the host."""

import copy
import math

import pytest
import torch

from mpxla.tests.backends import backend_here
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


class OneByOne(torch.optim.Optimizer):
    """Changes every parameter by `change`, which may keep state of it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(p, self.state[p], group["lr"]))


class CountsInPython(OneByOne):
    """Keeps its count of steps as a number, which a traced program would make a constant."""

    def change(self, p, state, lr):
        state["count"] = state.get("count", 0) + 1
        return p.grad * (lr / state["count"])


class Noisy(torch.optim.SGD):
    """Draws random numbers, though not enough of them to move a parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p) * 0)


class ByMeanNorms(OneByOne):
    """Keeps one number for every parameter, which follows its gradient, as NovoGrad does."""

    def change(self, p, state, lr):
        if not state:
            state |= {"step": torch.tensor(0.0), "mean": torch.zeros(())}
        state["step"] += 1
        state["mean"].lerp_(p.grad.square().sum(), 0.3)
        scale = (state["mean"] / (1 - 0.7 ** state["step"])).sqrt()
        return p.grad * (lr / scale)


class Factoring(OneByOne):
    """Keeps the second moment of what is large by columns, and of other parameters as a whole."""

    def change(self, p, state, lr):
        square, name = p.grad * p.grad, "moment"
        if p.shape[0] >= 4:
            name, square = "columns", square.mean(dim=0)
        if not state:
            state[name] = torch.zeros_like(square)
        state[name].mul_(0.9).add_(square)
        return lr * p.grad / (state[name].sqrt() + 1.0)


OPTIMIZERS = {
    "Mean norms": ByMeanNorms,
    "Factoring": Factoring,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "SGD dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Python": CountsInPython,
    "Noisy": lambda p: Noisy(p, lr=0.1),
}
LAZY = {
    "Python": "it keeps counts or values in Python",
    "Noisy": "it draws random numbers",
}
SHAPES = [(4, 3), (3,), (2, 2, 2)]


def make(device):
    generator = torch.Generator().manual_seed(0)
    host = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [torch.nn.Parameter(value.to(device)) for value in host]


def train(name, device, num_steps, compiled):
    """Values after some steps; the second group has its own rate, its last parameter rests once."""
    from mpxla.parallel.updates.update import CompiledUpdate

    backend = backend_here()
    parameters = make(device)
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.02}]
    optimizer = OPTIMIZERS[name](groups)
    update = CompiledUpdate(optimizer, backend) if compiled else None
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    generator = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        if step == 3:
            parameters[-1].grad = None
        if compiled:
            backend.adopt([p.grad for p in parameters if p.grad is not None])
            update.step()
            backend.flush()
        else:
            optimizer.step()
        scheduler.step()
    values = [p.detach().cpu() for p in parameters]
    return values, (len(update._programs), update.reason) if compiled else None


def train_both(names):
    device = backend_here().device
    return {
        name: (train(name, "cpu", 6, False)[0], *train(name, device, 6, True)) for name in names
    }


SIMILAR = [
    *("SGD", "SGD dampening", "Adam amsgrad", "NAdam", "RMSprop", "Adadelta", "Adamax"),
    *("RAdam", "Adagrad"),
]
"""Compiled as the others are: with momentum, with bias corrections, or plainly."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in OPTIMIZERS if name not in SIMILAR], id="some"),
        pytest.param(SIMILAR, id="similar", marks=pytest.mark.slow),
    ],
)
def test_updates_equal_those_on_the_host_whatever_the_optimizer(names):
    (found,) = run_ranks(train_both, 1, names)
    for name, (want, got, (num_programs, reason)) in found.items():
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(
                b, a, rtol=2e-6, atol=2e-7, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert reason == LAZY.get(name), name
        # All parameters; all but one; after its rest, its count differs from the others'.
        assert num_programs <= 3 and (num_programs > 0) == (reason is None), name


def train_with_hooks():
    from mpxla.parallel.updates.update import CompiledUpdate

    backend = backend_here()
    parameters = make(backend.device)
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    seen = []

    def note(name):
        return lambda *_: seen.append((name, all(p.grad is not None for p in parameters)))

    optimizer.register_step_pre_hook(note("before, early"))
    update = CompiledUpdate(optimizer, backend)
    optimizer.register_step_pre_hook(note("before, late"))
    optimizer.register_step_post_hook(note("after"))
    counts = []
    for step in range(4):
        for p in parameters:
            p.grad = torch.ones(p.shape).to(p.device)
        backend.adopt([p.grad for p in parameters])
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
        update.step()
        counts.append(backend.num_compilations)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    update.step()
    state = optimizer.state[parameters[0]]
    return seen[:3], counts, backend.num_compilations, state["step"].item(), update.was_compiled


def test_hooks_see_gradients_and_only_the_first_step_compiles():
    ((seen, counts, at_end, step, was_compiled),) = run_ranks(train_with_hooks, 1)
    assert seen == [("before, early", True), ("before, late", True), ("after", True)]
    assert counts[0] == counts[-1]
    assert step == 5 and was_compiled
    assert math.isclose(at_end, counts[-1], abs_tol=1)  # loading may give counters a place each


def cycle_momentum():
    from mpxla.parallel.updates.update import CompiledUpdate

    backend = backend_here()
    (parameter,) = parameters = make(backend.device)[:1]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    update = CompiledUpdate(optimizer, backend)
    for step in range(12):
        parameter.grad = torch.ones(parameter.shape).to(parameter.device)
        backend.adopt([parameter.grad])
        optimizer.param_groups[0]["momentum"] = 0.9 - 0.01 * step
        update.step()
        backend.flush()
    return update.reason, parameter.detach().cpu()


def test_settings_that_change_in_every_step_end_compilation():
    ((reason, value),) = run_ranks(cycle_momentum, 1)
    assert reason == "its settings change from step to step"
    (expected,) = parameters = make("cpu")[:1]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for step in range(12):
        expected.grad = torch.ones(expected.shape)
        optimizer.param_groups[0]["momentum"] = 0.9 - 0.01 * step
        optimizer.step()
    torch.testing.assert_close(value, expected.detach(), rtol=2e-6, atol=2e-7)


def train_after_loading(compiled):
    """Loads the state of one parameter in another order than AdamW's own."""
    from mpxla.parallel.updates.update import CompiledUpdate

    backend = backend_here()
    device = backend.device if compiled else "cpu"
    weight = torch.nn.Parameter(torch.tensor([0.5, 1.0, -1.0]).to(device))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    update = CompiledUpdate(optimizer, backend) if compiled else optimizer
    for step in range(4):
        weight.grad = torch.tensor([1.0, -2.0, 0.1]).to(device)
        update.step()
        backend.flush()
        if step == 1:
            saved = optimizer.state_dict()
            saved["state"][0] = dict(reversed(saved["state"][0].items()))
            optimizer.load_state_dict(saved)
    return weight.detach().cpu()


def test_state_is_found_by_name():
    got, want = (run_ranks(train_after_loading, 1, compiled)[0] for compiled in (True, False))
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-7)


def step_with_rate_zero(name):
    """An embedding of which one row is never read, warmed up from 0."""
    from mpxla.parallel.updates.update import CompiledUpdate

    backend = backend_here()
    values = []
    for compiled in (False, True):
        device = backend.device if compiled else "cpu"
        weight = torch.nn.Parameter(torch.tensor([0.5, 0.0, -1.0]).to(device))
        optimizer = OPTIMIZERS[name]([weight])
        update = CompiledUpdate(optimizer, backend) if compiled else optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
        for _ in range(3):
            weight.grad = torch.tensor([1.0, -2.0, 0.0]).to(device)
            update.step()
            scheduler.step()
            backend.flush()
            values.append(weight.detach().cpu().clone())
    return values


@pytest.mark.parametrize("name", ["SGD momentum", "Adam amsgrad", "AdamW fused", "NAdam"])
def test_a_rate_of_zero_moves_nothing(name):
    (values,) = run_ranks(step_with_rate_zero, 1, name)
    torch.testing.assert_close(values[3:], values[:3], rtol=1e-5, atol=1e-20)


def resume(name):
    """Loads its own state as scripts do: torch gives counters the type of the parameters."""
    from mpxla.parallel.updates.update import CompiledUpdate

    backend = backend_here()
    values = []
    for compiled in (False, True):
        device = backend.device if compiled else "cpu"
        weight = torch.nn.Parameter(torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64).to(device))
        optimizer = OPTIMIZERS[name]([weight])
        update = CompiledUpdate(optimizer, backend) if compiled else optimizer
        for number in range(4):
            weight.grad = torch.tensor([1.0, -2.0, 0.3], dtype=torch.float64).to(device)
            update.step()
            if number == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            backend.flush()
            values.append(weight.detach().cpu().clone())
    return values


def test_state_may_change_its_type():
    (values,) = run_ranks(resume, 1, "NAdam", env={"MPXLA_DEVICE": "pjrt"})
    torch.testing.assert_close(values[4:], values[:4])
