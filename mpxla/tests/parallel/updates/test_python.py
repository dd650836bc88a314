"""Optimizers that keep state in Python, or tensors of their own: same numbers as on the host."""

import itertools
import random

import numpy as np
import pytest
import torch

from mpxla.parallel.updates.python import NotTraceableError, described
from mpxla.tests.backends import backend_here
from mpxla.tests.ranks.run import run_ranks

NUM_STEPS = 5
CALLS = [0]
CALLED = 0


class Decaying(torch.optim.Optimizer):
    """SGD whose rate is divided by the number of the step, wherever that number is kept."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.keep()

    def keep(self):
        pass

    def count(self):
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        count = self.count()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] / count))


class InList(Decaying):
    def keep(self):
        self.counts = [0]

    def count(self):
        self.counts[0] += 1
        return self.counts[0]


class InDict(Decaying):
    def keep(self):
        self.seen = {"of": {"steps": 0}}

    def count(self):
        self.seen["of"]["steps"] += 1
        return self.seen["of"]["steps"]


class InTensor(Decaying):
    def keep(self):
        self.steps = torch.zeros(())

    def count(self):
        self.steps += 1
        return self.steps


class Clock:
    def __init__(self):
        self.time = 0

    def tick(self):
        self.time += 1
        return self.time


class InObject(Decaying):
    def keep(self):
        self.clock = Clock()

    def count(self):
        return self.clock.tick()


class InIterator(Decaying):
    def keep(self):
        self.numbers = (number for number in itertools.count(1))

    def count(self):
        return next(self.numbers)


class InCounter(Decaying):
    def keep(self):
        self.numbers = itertools.count(1)

    def count(self):
        return next(self.numbers)


class InGroup(Decaying):
    def count(self):
        counts = self.param_groups[0].setdefault("counts", [0])
        counts[0] += 1
        return counts[0]


class InSharedState(Decaying):
    def count(self):
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        return self.state["all"]["steps"]


class InModule(Decaying):
    def keep(self):
        CALLS[0] = 0

    def count(self):
        CALLS[0] += 1
        return CALLS[0]


class InVariable(Decaying):
    def keep(self):
        global CALLED
        CALLED = 0

    def count(self):
        global CALLED
        CALLED += 1
        return CALLED


class InClass(Decaying):
    steps = [0]

    def keep(self):
        self.steps[0] = 0

    def count(self):
        self.steps[0] += 1
        return self.steps[0]


class InDraws(Decaying):
    def keep(self):
        random.seed(4)

    def count(self):
        return 1.0 + random.random()


class InArray(Decaying):
    def keep(self):
        self.steps = np.zeros(1)

    def count(self):
        self.steps += 1
        return float(self.steps[0])


class Set(Decaying):
    """The script changes what it reads."""

    def keep(self):
        self.divisor = 1.0

    def count(self):
        return self.divisor


class Wrapping(torch.optim.Optimizer):
    """Lookahead: another optimizer inside, and slow weights outside of the state."""

    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=0.1)
        super().__init__(self.inner.param_groups, {})
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.calls += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, s in zip(group["params"], slow, strict=True):
                if self.calls % 2 == 0:
                    s.add_((p - s) * 0.5)
                    p.copy_(s)


class Trusting(torch.optim.Optimizer):
    """Does not ask whether parameters have gradients."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * 0.1)


class DecayingFirst(Trusting):
    """Asks too late."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
                if p.grad is not None:
                    p.sub_(p.grad * 0.1)


KINDS = [
    *(InList, InDict, InTensor, InObject, InIterator, InCounter, InGroup, InSharedState),
    *(InModule, InVariable, InClass, InDraws, InArray, Set, Wrapping),
    *(Trusting, DecayingFirst),
]
REASONS = {
    "InList": "it keeps counts or values in Python",
    "InDict": "it keeps counts or values in Python",
    "InTensor": "it keeps a tensor outside of its state (steps)",
    "InObject": "it keeps counts or values in Python",
    "InIterator": "it reads an iterator (numbers)",
    "InCounter": "it reads an iterator (numbers)",
    "InGroup": "it keeps counts or values in Python",
    "InSharedState": "it keeps counts or values in Python",
    "InModule": "it reads the list CALLS of its module",
    "InVariable": "it changes the variable CALLED of its module",
    "InClass": "its class keeps a list (steps)",
    "InDraws": "it draws random numbers",
    "InArray": "it keeps counts or values in Python",
    "Set": None,
    "Wrapping": "it keeps a tensor outside of its state (inner.param_groups",
    "Trusting": "it does not leave alone what has no gradient",
    "DecayingFirst": "it does not leave alone what has no gradient",
}


def train(kind, compiled):
    """Values after some steps, and why updates are not compiled."""
    from mpxla.parallel.updates.update import CompiledUpdate

    backend = backend_here()
    device = backend.device if compiled else "cpu"
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
        for shape in ((4, 3), (3,))
    ]
    optimizer = kind(parameters)
    update = CompiledUpdate(optimizer, backend) if compiled else optimizer
    for step in range(NUM_STEPS):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        if kind is Set:
            optimizer.divisor = 1.0 + step
        if compiled:
            backend.adopt([p.grad for p in parameters])
        update.step()
        backend.flush()
    values = [p.detach().cpu() for p in parameters]
    return values, getattr(update, "reason", None)


def train_all():
    return {kind.__name__: (train(kind, False)[0], *train(kind, True)) for kind in KINDS}


@pytest.mark.ranks
def test_state_outside_of_tensors_is_not_made_a_constant():
    (found,) = run_ranks(train_all, 1)
    for name, (want, got, reason) in found.items():
        expected = REASONS[name]
        assert reason == expected or (reason or "").startswith(expected or "?"), (name, reason)
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(
                b, a, rtol=2e-6, atol=2e-7, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_what_is_described():
    optimizer = InList([torch.nn.Parameter(torch.zeros(2))])
    before = described(optimizer)
    assert before == described(optimizer)
    hash(before)
    optimizer.counts[0] = 7
    assert described(optimizer) != before
    optimizer.circle = [optimizer.counts]
    optimizer.circle.append(optimizer.circle)
    described(optimizer)
    optimizer.table = {"deep": [Clock()]}
    optimizer.table["deep"][0].time = torch.zeros(1)
    with pytest.raises(NotTraceableError, match=r"\(table\['deep'\]\[0\]\.time\)"):
        described(optimizer)
