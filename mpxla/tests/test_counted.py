"""Numbers in Python that a step function changes: every microbatch has those of plain PyTorch."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import StepError
from mpxla.tests.clients import close, host, logged, train_step
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_python_state import batch

pytestmark = pytest.mark.ranks

NUM_STEPS = 4
functional = nn.functional
progress = {"seen": 0, "rate": 0.5}
total = 0


class Schedule:
    """An object of the script's."""

    def __init__(self):
        self.step = 0

    def weight(self):
        self.step += 1
        return min(1.0, self.step / 5)


class Annealed(nn.Module):
    """A part that is no part of the model where a list holds it."""

    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def forward(self, h):
        self.num_calls += 1
        return h * min(1.0, self.num_calls / 5)


class Net(nn.Module):
    """Layers around what `kind` names."""

    limit = 3  # of the class, until it is changed

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.num_calls, self.temperature, self.is_set = 0, 2.0, False
        self.rates = [0.5, 1.0, 2.0]
        self.schedule, self.stats = Schedule(), {"calls": 0, "name": "net"}
        self.schedule.parts = {"annealed": [Annealed()]}
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.kind in OPERATIONS:
            return OPERATIONS[self.kind](self, h)
        return self.last(getattr(self, self.kind)(h) if self.training else h / self.temperature)

    def counted(self, h):
        self.num_calls += 1
        return h

    def annealed(self, h):
        self.temperature = max(0.5, 0.9 * self.temperature)
        return h / self.temperature

    def every_third(self, h):
        self.num_calls += 1
        return 2 * h if self.num_calls % 3 == 0 else h

    def late(self, h):
        self.num_calls += 1
        return h.relu() if self.num_calls > 5 else h

    def exponential(self, h):
        self.num_calls += 1
        return h * (0.5 + math.exp(-0.1 * self.num_calls))

    def by_place(self, h):
        self.num_calls = (self.num_calls + 1) % 3
        return h * self.rates[self.num_calls]

    def of_the_class(self, h):
        self.limit -= 1
        return h if self.limit > 0 else -h

    def of_an_object(self, h):
        return h * self.schedule.weight()

    def of_held_modules(self, h):
        return self.schedule.parts["annealed"][0](h)

    def of_globals(self, h):
        global total
        total += 1
        return h * (1 + total / 10)

    def of_dictionaries(self, h):
        progress["seen"] += 1
        self.stats["calls"] += 2
        h = 2 * h if progress["seen"] % 4 == 3 else h
        return h * (1 + self.stats["calls"] / 20)

    def started(self, h):
        with torch.no_grad():
            if self.is_set:
                self.mean.lerp_(h.mean(0), 0.5 / self.num_calls)
            else:
                self.mean.copy_(h.mean(0))
                self.is_set = True
        self.num_calls += 1
        return h - self.mean

    def reset(self, h):
        self.num_calls += 1
        if self.num_calls == 3:
            self.num_calls = 0
            return 3 * h
        return h

    def divided(self, h):
        return h / self.temperature

    def of_settings(self, h):
        return h * progress["rate"]

    def every_tenth(self, h):
        return 2 * h if self.num_calls % 10 == 0 else h

    def asking(self, h):
        self.num_calls += 1
        if self.num_calls > 2 and h.sum() > 0:
            return 2 * h
        return h


KINDS = (
    "counted annealed every_third late exponential by_place of_the_class of_an_object of_globals "
    "of_held_modules of_dictionaries started reset"
).split()


def raw_model(kind):
    global total
    total = progress["seen"] = 0
    torch.manual_seed(3)
    return Net(kind)


def numbers_of(model):
    return {
        "calls": model.num_calls,
        "temperature": model.temperature,
        "limit": model.limit,
        "step": model.schedule.step,
        "part": model.schedule.parts["annealed"][0].num_calls,
        "total": total,
        "dictionaries": {**progress, **model.stats},
        "is set": model.is_set,
    }


def train_plainly(kind, microbatches):
    model = raw_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, numbers = [], []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(v.chunk(microbatches) for v in batch(number)), strict=True):
            loss = functional.cross_entropy(model(x), y)
            (loss / microbatches).backward()
            losses.append(loss.item())
        optimizer.step()
        numbers.append(numbers_of(model))
        model.eval()
        losses.append(sum(model(x).sum().item() for x in batch(number)[0].chunk(microbatches)))
        model.train()
    return torch.tensor(losses), host(model.state_dict().items()), numbers


def train(keys, kind):
    smp.init(keys)
    raw = raw_model(kind)
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    step, evaluate = smp.step(train_step), smp.step(lambda model, x: model(x).sum())
    losses, numbers = [], []
    with logged() as lines:
        for number in range(NUM_STEPS):
            model.train()
            optimizer.zero_grad()
            losses += [loss.item() for loss in step(model, *batch(number)).outputs]
            optimizer.step()
            numbers.append(numbers_of(raw))
            model.eval()
            losses.append(evaluate(model, batch(number)[0]).reduce_sum().item())
    state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    return torch.tensor(losses), state, numbers, lines


def slow_but(*fast):
    return [
        pytest.param(kind, *shape, marks=() if (kind, shape) in fast else pytest.mark.slow)
        for kind in KINDS
        for shape in ((2, 1, 2), (1, 1, 4), (1, 2, 2))
    ]


@pytest.mark.parametrize(
    ("kind", "stages", "replicas", "count"),
    slow_but(("every_third", (2, 1, 2)), ("of_held_modules", (1, 1, 4))),
)
def test_every_microbatch_has_the_number_of_pytorch(kind, stages, replicas, count):
    expected, parameters, numbers = train_plainly(kind, count)
    keys = {"pipeline_parallel_degree": stages, "microbatches": count, "ddp": replicas > 1}
    for losses, state, found, lines in run_ranks(train, stages * replicas, keys, kind):
        close(losses, expected)
        close(state, parameters)
        assert found == numbers
        assert not [line for line in lines if "reads and changes" in line]
        programs = sum("compiled step function train_step" in line for line in lines)
        assert programs <= (3 if kind == "by_place" else 2)


def train_with_changes(keys, kind):
    """Numbers that change between steps: programs, losses and what there should be."""
    smp.init(keys)
    raw = raw_model(kind).train()
    model = smp.DistributedModel(raw)
    step = smp.step(lambda model, x: model(x).sum())
    plain = raw_model(kind).train()
    found = []
    with logged() as lines:
        for number in range(8):
            raw.temperature = plain.temperature = 2.0 - number / 10
            raw.num_calls = plain.num_calls = 5 * number
            progress["rate"] = 1 + number / 4
            x = batch(number)[0]
            found.append((step(model, x).reduce_sum().item(), plain(x).sum().item()))
    return found, sum("compiled step function" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("divided", 2),
        ("of_settings", 2),
        pytest.param("every_tenth", 4, marks=pytest.mark.slow),
    ],
)
def test_numbers_that_change_between_steps_become_inputs(kind, most):
    for found, programs in run_ranks(train_with_changes, 1, {"microbatches": 2}, kind):
        for value, wanted in found:
            close(torch.tensor(value), torch.tensor(wanted))
        assert programs <= most


OPERATIONS = {
    "slice": lambda net, h: h[:, : net.num_calls].sum(),
    "count": lambda net, h: (h * torch.arange(net.num_calls).sum()).sum(),
    "size": lambda net, h: h.view(-1, net.num_calls)[0].sum(),
    "number of an operator": lambda net, h: h.topk(net.num_calls, -1)[0].sum(),
    "float of an operator": lambda net, h: functional.leaky_relu(h, net.temperature).sum(),
    "factor by name": lambda net, h: torch.add(h, h.tanh(), alpha=net.temperature).sum(),
    "power": lambda net, h: ((h.abs() + 1) ** net.temperature).sum(),
    "integer": lambda net, h: h[:, : int(2 * net.temperature)].sum(),
    "bits": lambda net, h: h.sum() * (net.num_calls >> 1),
    "text": lambda net, h: h.sum() * (2 if f"{net.num_calls}".startswith("4") else 1),
    "type": lambda net, h: h.sum() * (net.num_calls if isinstance(net.num_calls, int) else 9),
    "numpy": lambda net, h: h.sum() * float(np.cos(net.temperature)),
}


def operate(names):
    smp.init({"microbatches": 1})
    found = {}
    for name in names:
        model, plain = smp.DistributedModel(raw_model(name)), raw_model(name)
        raw = model.module
        step = smp.step(lambda model, x: model(x))
        for count, temperature in ((2, 0.5), (4, 0.7), (2, 0.9), (8, 1.5)):
            for net in (raw, plain):
                net.num_calls, net.temperature = count, temperature
            x = batch(count)[0]
            found.setdefault(name, []).append((step(model, x).outputs[0].item(), plain(x).item()))
    return found


@pytest.mark.parametrize(
    "names",
    [
        ["float of an operator", "text", "numpy"],
        pytest.param([*OPERATIONS], marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_operators_that_need_numbers_have_those_of_now(names):
    (found,) = run_ranks(operate, 1, names)
    for name, pairs in found.items():
        for value, wanted in pairs:
            assert value == pytest.approx(wanted, rel=1e-4, abs=1e-5), name


def ask_and_count():
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(raw_model("asking"))
    step = smp.step(train_step)
    step(model, *batch(0))
    with pytest.raises(StepError) as error:
        step(model, *batch(1))
    return str(error.value)


def test_a_number_beside_a_branch_on_the_model_is_refused():
    (text,) = run_ranks(ask_and_count, 1)
    assert re.search(r"train_step changes model\.num_calls, and branches on values", text)
    assert "register_buffer" in text
