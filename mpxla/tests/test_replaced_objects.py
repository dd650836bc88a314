"""Objects with attributes that a script puts in the place of others, between steps."""

import functools
import operator
import re
from collections import ChainMap, UserList, deque
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import close, train_step
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_python_state import batch

pytestmark = pytest.mark.ranks

functional = nn.functional


class Meter:
    """Counts, and keeps what it was given last."""

    def __init__(self):
        self.last, self.count = 0.0, 0

    def update(self, value):
        self.last = value
        self.count += 1


class Replaced(nn.Module):
    """Reads attributes of objects that the script replaces."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.meter, self.settings, self.listed = Meter(), Settings(1.0), [Settings(1.0)]
        self.deep = Settings(Settings(1.0))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        self.meter.update(h.norm().item())
        scale = self.settings.scale * self.listed[0].scale * self.deep.scale.scale
        return self.last(h * scale * common.scale * (1 + self.meter.count / 10))


class Settings:
    """An object of the script's."""

    def __init__(self, scale):
        self.scale = scale


class Tripled(Settings):
    """One of another class."""

    def __init__(self, scale):
        super().__init__(3 * scale)


common = Settings(1.0)


def replace_one(model, number):
    """A few of many; some are as they were. The first is no change."""
    global common
    if number == 0:
        common = Settings(1.0)
    elif number == 1:
        model.meter, model.settings = Meter(), Settings(1.0)
    elif number == 2:
        model.settings, model.listed[0] = Settings(2.0), Settings(0.5)
    elif number == 3:
        model.deep.scale = Settings(1.5)
    elif number == 4:
        model.deep, common = Settings(Settings(0.5)), model.settings
    elif number == 5:
        model.settings, model.meter = Tripled(0.5), Meter()


QUICK, ALL = (0, 1, 2, 5), tuple(range(7))


def train_replaced(keys, numbers):
    torch.manual_seed(3)
    raw = Replaced()
    if keys is None:
        model, optimizer = raw, torch.optim.SGD(raw.parameters(), lr=0.1)
    else:
        smp.init(keys)
        model = smp.DistributedModel(raw)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        step = smp.step(train_step)
    found, values = [], []
    for number in numbers:
        replace_one(raw, number)
        optimizer.zero_grad()
        if keys is None:
            for x, y in zip(*(v.chunk(2) for v in batch(number)), strict=True):
                loss = functional.cross_entropy(model(x), y)
                (loss / 2).backward()
                found.append(loss.item())
        else:
            found += [loss.item() for loss in step(model, *batch(number)).outputs]
        optimizer.step()
        values.append(rounded(repr(vars(raw.meter))))
    return torch.tensor(found), values


@pytest.mark.parametrize(
    ("stages", "numbers"),
    [(2, QUICK), *(pytest.param(stages, ALL, marks=pytest.mark.slow) for stages in (1, 2))],
)
def test_objects_that_a_script_replaces_are_read_and_counted_in(stages, numbers):
    expected, wanted = train_replaced(None, numbers)
    keys = {"pipeline_parallel_degree": stages, "microbatches": 2}
    for losses, values in run_ranks(train_replaced, stages, keys, numbers):
        close(losses, expected)
        assert values == wanted


class Various(nn.Module):
    """Reads what has no attributes of Python, or those of a library's class."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        for name, make in MAKE.items():
            setattr(self, name, make(1))

    def forward(self, x):
        h = self.layer(x)
        for name, use in USE.items():
            h = use(getattr(self, name), h)
        return h


MAKE = {
    "partial": lambda n: functools.partial(torch.mul, other=1 + n / 10),
    "decimal": lambda n: Decimal(n),
    "fraction": lambda n: Fraction(n, 2),
    "places": lambda n: range(n),
    "part": lambda n: slice(0, n),
    "kind": lambda n: (nn.Tanh, nn.Sigmoid)[n - 1],
    "getter": lambda n: operator.itemgetter(n),
    "chained": lambda n: ChainMap({"n": n}),
    "seen": lambda n: MappingProxyType({"n": n}),
    "listed": lambda n: UserList([n]),
    "waiting": lambda n: deque([Settings(n / 2)]),
    "inside": lambda n: (Settings(1.0), {"a": [Settings(n / 2)]}),
}
USE = {
    "partial": lambda value, h: value(h),
    "decimal": lambda value, h: h / float(value),
    "fraction": lambda value, h: h * float(value),
    "places": lambda value, h: h * len(value),
    "part": lambda value, h: h * (1 + h[:, value].mean()),
    "kind": lambda value, h: value()(h),
    "getter": lambda value, h: h * value([1.0, 1.5, 2.0]),
    "chained": lambda value, h: h + h.roll(1, 1) * value["n"],
    "seen": lambda value, h: h * value["n"],
    "listed": lambda value, h: h - h.roll(2, 1) * value[0] / 3,
    "waiting": lambda value, h: h * value[0].scale,
    "inside": lambda value, h: h + h.roll(1) * value[1]["a"][0].scale,
}


def train_various(keys):
    torch.manual_seed(3)
    raw = Various()
    model = raw
    if keys is not None:
        smp.init(keys)
        model = smp.DistributedModel(raw)
        step = smp.step(train_step)
    found = []
    for name, make in ({"": None} | MAKE).items():
        if name:
            setattr(raw, name, make(2))
        if keys is None:
            found += [functional.cross_entropy(model(x), y) for x, y in [batch(0)]]
        else:
            found.append(step(model, *batch(0)).reduce_mean())
    return torch.stack(found).detach()


@pytest.mark.slow
def test_other_values_that_a_script_replaces_are_noticed():
    expected = train_various(None)
    assert (expected.diff().abs() > 0.01).all()  # each of them matters
    (losses,) = run_ranks(train_various, 1, {"microbatches": 1})
    close(losses, expected)


def rounded(text):
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.4f}", text)
