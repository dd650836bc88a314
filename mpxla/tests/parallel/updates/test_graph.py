"""An update's graph: equal parameters are traced once, and the numbers are the optimizer's own."""

import pytest
import torch
from torch import nn, optim

import mpxla.parallel.updates.graph as module
from mpxla.device.eager import EagerBackend
from mpxla.kept import Kept
from mpxla.parallel.updates.update import CompiledUpdate

pytestmark = pytest.mark.unit

SHAPES = [(3, 4), (4,), (3, 4), (4,), (4,), (2, 2)]


SCALARS = [
    (optim.SGD, {"momentum": 0.9}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (optim.Adadelta, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.Rprop, {}),
    (optim.ASGD, {}),
]
CASES = [
    pytest.param(options, id=options[0].__name__, marks=[pytest.mark.slow] * (number > 1))
    for number, options in enumerate(SCALARS)
]


@pytest.fixture
def traced(monkeypatch):
    """Numbers of arguments of the functions that are traced."""
    found, trace = [], module.trace_program

    def counted(name, function, inputs, lowering):
        found.append(len(inputs))
        return trace(name, function, inputs, lowering)

    monkeypatch.setattr(module, "trace_program", counted)
    return found


def parameters_of(seed=0):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def stepped(make, compiled, num_steps=3, seed=0, kept=None):
    parameters = parameters_of(seed)
    optimizer = make(parameters)
    backend = EagerBackend()
    update = CompiledUpdate(optimizer, backend, kept=kept) if compiled else optimizer
    for step in range(num_steps):
        torch.manual_seed(step)
        for p in parameters:
            p.grad = torch.randn_like(p)
        update.step()
    assert not compiled or update.reason is None
    return parameters, optimizer


def assert_equal(make, num_steps=3):
    parameters, optimizer = stepped(make, True, num_steps)
    others, plain = stepped(make, False, num_steps)
    for p, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(p, other)
        for key, value in plain.state[other].items():
            torch.testing.assert_close(optimizer.state[p][key], value, check_dtype=False)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.NAdam])
def test_two_shapes_are_traced_for_all(kind, traced):
    assert_equal(lambda ps: kind(ps, lr=0.1, weight_decay=0.1))
    assert len(traced) == 2


class OneByOne(optim.SGD):
    """Takes a multiple of `change_of` a gradient from every parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change_of(p.grad) * group["lr"])


class ByMean(OneByOne):
    """The mean of a gradient: a number of the graph follows from the shape."""

    def change_of(self, grad):
        return grad.sum() / grad.numel()


class ByConstant(OneByOne):
    """A number that follows from the shape by a tensor, which the graph reads as a constant."""

    def change_of(self, grad):
        return grad * torch.tensor([1.0 / grad.numel()])


class ByLength(OneByOne):
    """Depends on the first of the sizes by the graph alone."""

    def change_of(self, grad):
        rows = grad.flatten(1) if grad.dim() > 1 else grad[None]
        return (rows * torch.ones_like(rows[:1])).sum()


@pytest.mark.parametrize("kind", [ByMean, ByConstant, ByLength])
def test_what_depends_on_the_shape_is_traced_for_each(kind, traced, monkeypatch):
    monkeypatch.setattr(module, "ELEMENTWISE", (*module.ELEMENTWISE, kind))
    assert_equal(lambda ps: kind(ps, lr=0.1))
    assert len(traced) == 3


@pytest.mark.parametrize("options", CASES)
def test_scalars_have_state_of_their_own(options, traced, monkeypatch):
    """Their moments are single numbers, as counts of steps are, and are not shared like these."""
    kind, settings = options
    monkeypatch.setattr(f"{__name__}.SHAPES", [(2,), (3,), (), (), (4,)])
    assert_equal(lambda ps: kind(ps, lr=0.1, **settings), num_steps=4)
    assert len(traced) == 3


@pytest.mark.parametrize("options", CASES)
def test_loaded_state_of_scalars_stays_their_own(options, monkeypatch):
    kind, settings = options
    monkeypatch.setattr(f"{__name__}.SHAPES", [(), (), (3,)])

    def train(compiled):
        parameters, optimizer = stepped(lambda ps: kind(ps, lr=0.1, **settings), compiled, 2)
        state, values = optimizer.state_dict(), [p.detach() for p in parameters]
        others = [nn.Parameter(value.clone()) for value in values]
        loaded = kind(others, lr=0.1, **settings)
        loaded.load_state_dict(state)
        update = CompiledUpdate(loaded, EagerBackend()) if compiled else loaded
        for step in range(2):
            for number, p in enumerate(others):
                p.grad = torch.full_like(p, number - step + 0.5)
            update.step()
        assert not compiled or update.reason is None
        return others

    for p, other in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(p, other)


def test_groups_have_settings_of_their_own(traced):
    assert_equal(
        lambda ps: optim.AdamW(
            [
                {"params": ps[:2], "weight_decay": 0.5, "lr": 0.1},
                {"params": ps[2:4], "weight_decay": 0.0, "lr": 0.01},
                {"params": ps[4:], "weight_decay": 0.0, "lr": 0.1, "betas": (0.5, 0.6)},
            ]
        )
    )
    assert len(traced) == 6, "two shapes in every group"


def test_counts_of_steps_differ_where_a_parameter_joined_later(traced):
    """Its count is another argument, so the kind is the same and the numbers are not."""

    def train(compiled):
        parameters = parameters_of()
        optimizer = optim.Adam(parameters, lr=0.1)
        update = CompiledUpdate(optimizer, EagerBackend()) if compiled else optimizer
        for step in range(4):
            for i, p in enumerate(parameters):
                p.grad = torch.full_like(p, 0.1 + i) if step >= 2 or i != 2 else None
            update.step()
        return parameters

    for p, other in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(p, other)


class Remembering(optim.SGD):
    """One that is not torch's own: it may look at other parameters."""

    def step(self, closure=None):
        total = sum(p.grad.sum() for p in self.param_groups[0]["params"] if p.grad is not None)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(total * 0.01)


def test_other_optimizers_are_traced_as_a_whole(traced):
    assert_equal(lambda ps: Remembering(ps, lr=0.1))
    assert len(traced) == 1 and traced[0] >= 2 * len(SHAPES)


def adam(parameters):
    return optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize(
    "kind",
    [
        *(optim.Adam, optim.Adamax, optim.SGD),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind, _ in SCALARS
            if kind not in (optim.Adamax, optim.SGD)
        ),
    ],
)
def test_a_second_start_traces_nothing(kind, traced, tmp_path):
    def start():
        return stepped(lambda ps: kind(ps, lr=0.1), True, kept=Kept(tmp_path))

    (first, _), num_traced = start(), len(traced)
    (second, _), (plain, _) = start(), stepped(lambda ps: kind(ps, lr=0.1), False)
    assert 0 < num_traced == len(traced)
    for p, other, another in zip(second, first, plain, strict=True):
        assert torch.equal(p, other)
        torch.testing.assert_close(p, another)


@pytest.mark.parametrize(
    "other",
    [
        lambda ps: optim.AdamW(ps, lr=0.1, weight_decay=0.2),
        lambda ps: optim.AdamW([{"params": ps[:2], "eps": 0.1}, {"params": ps[2:]}], lr=0.1),
        lambda ps: optim.Adam(ps, lr=0.1, weight_decay=0.1),
        *(
            pytest.param(other, marks=pytest.mark.slow)
            for other in (
                lambda ps: optim.AdamW(ps, lr=0.1, weight_decay=0.1, betas=(0.8, 0.99)),
                lambda ps: optim.AdamW(ps, lr=0.1, weight_decay=0.1, maximize=True),
                lambda ps: optim.AdamW(ps[:-1], lr=0.1, weight_decay=0.1),
                lambda ps: optim.AdamW(ps[::-1], lr=0.1, weight_decay=0.1),
            )
        ),
    ],
)
def test_other_updates_are_not_mistaken_for_kept_ones(other, traced, tmp_path):
    stepped(adam, True, kept=Kept(tmp_path))
    before = len(traced)
    parameters, _ = stepped(other, True, kept=Kept(tmp_path))
    assert len(traced) > before
    for p, plain in zip(parameters, stepped(other, False)[0], strict=True):
        torch.testing.assert_close(p, plain)


def test_a_learning_rate_is_an_argument_of_kept_updates(traced, tmp_path):
    def start(rate, compiled=True):
        def make(parameters):
            optimizer = adam(parameters)
            optimizer.param_groups[0]["lr"] = rate
            return optimizer

        return stepped(make, compiled, kept=Kept(tmp_path))[0]

    start(0.1)
    before = len(traced)
    for p, plain in zip(start(0.7), start(0.7, False), strict=True):
        torch.testing.assert_close(p, plain)
    assert len(traced) == before


class Own(optim.AdamW):
    """Of a user's: its code may change under its name."""


def test_code_of_users_is_not_kept(traced, tmp_path, monkeypatch):
    def start(make):
        before = len(traced)
        stepped(make, True, kept=Kept(tmp_path))
        return len(traced) - before

    monkeypatch.setattr(module, "ELEMENTWISE", (*module.ELEMENTWISE, Own))
    assert start(lambda ps: Own(ps, lr=0.1)) and start(lambda ps: Own(ps, lr=0.1))
    assert start(adam) and not start(adam)
    step = optim.AdamW.step
    monkeypatch.setattr(optim.AdamW, "step", lambda self, closure=None: step(self, closure))
    assert start(adam)
