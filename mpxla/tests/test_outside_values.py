"""Settings that a step reads from nested containers, objects, classes and files, and that change.

A program has the values of its capture. What changes is captured again; what is beside it is not.
"""

import array
import collections
import functools
import os
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests import settings_of_scripts as script
from mpxla.tests.clients import logged
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.settings_of_scripts import shifted

pytestmark = pytest.mark.ranks


class OfObjects:
    """An attribute that the class itself has no value of, as members of an enumeration have."""

    def __get__(self, instance, owner=None):
        assert instance is not None, "its code does not run but where the user's does"
        return "added"


class Config:
    base = 1.0
    kind = OfObjects()

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def added(self, y):
        return y + self.alpha

    def replaced(self, y):
        return y

    @classmethod
    def lowest(cls):
        return cls.base


class Single:
    instance = None

    def __new__(cls):
        if cls.instance is None:
            cls.instance = super().__new__(cls)
        return cls.instance


class Access(Config):
    """Looks its attributes up by itself, as configurations of transformers do."""

    def __getattribute__(self, name):
        return super().__getattribute__(name)


@dataclass(slots=True)
class Slots:
    alpha: float = 1.0


def made(alpha):
    """Everything that the functions below read, with one value."""
    return {
        "settings": {"alpha": alpha, "step": 0},
        "nested": Config(inner=Config(alpha=alpha), table={"alpha": alpha}, rows=[[alpha], [2]]),
        "own": Access(alpha=alpha),
        "slots": Slots(alpha),
        "space": SimpleNamespace(alpha=alpha, step=0),
        "numbers": np.full(2, alpha),
        "large": {"array": np.full(20_000, alpha), "list": [alpha] * 2_000},
        "tensor": torch.full((), alpha),
        "loss": abs if alpha == 1.0 else torch.square,
    }


settings = made(1.0)["settings"]
nested = made(1.0)["nested"]
own = made(1.0)["own"]
slots = made(1.0)["slots"]
space = made(1.0)["space"]
numbers = made(1.0)["numbers"]
of_thread = threading.local()
of_context = ContextVar("of_context")
in_order = collections.OrderedDict(first=1.0, second=4.0)
doubles = array.array("d", [1.0])
VARIABLE = "MPXLA_TEST_ALPHA"
large = made(1.0)["large"]
tensor = made(1.0)["tensor"]
loss = made(1.0)["loss"]


class Layer(nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.linear, self.config, self.options = nn.Linear(5, 5), Config(alpha=1.0), {"alpha": 1.0}

    def forward(self, x):
        y = self.linear(x) * settings["alpha"] + self.config.alpha * self.scale
        return getattr(self, self.config.kind)(y)

    def extra_repr(self):
        raise AssertionError("nobody prints it")

    def added(self, y):
        return y + self.options["alpha"] + tensor


def with_default(y, weights=nested.rows):
    return y + weights[0][0]


READERS = {
    "dictionary": lambda y: y + settings["alpha"],
    "object in an object": lambda y: y + nested.inner.alpha,
    "dictionary in an object": lambda y: y + nested.table["alpha"],
    "list in a list": lambda y: y + nested.rows[0][0],
    "own access": lambda y: y + own.alpha,
    "slots": lambda y: y + slots.alpha,
    "namespace": lambda y: y + space.alpha,
    "array": lambda y: y + float(numbers[0]),
    "large array": lambda y: y + float(large["array"][-1]),
    "large list": lambda y: y + large["list"][-1],
    "tensor": lambda y: y + tensor,
    "function": lambda y: loss(y),
    "class": lambda y: y + Config.base,
    "class of an object": lambda y: y + nested.base,
    "method": own.added,
    "file": lambda y: y + script.ALPHA,
    "dictionary of a file": lambda y: y + script.TABLE["alpha"],
    "function of a file": lambda y: shifted(y),
    "partial": functools.partial(lambda y, table: y + table["alpha"], table=settings),
    "default": with_default,
    "thread": lambda y: y + of_thread.alpha,
    "context": lambda y: y + of_context.get(),
    "environment": lambda y: y + float(os.environ["MPXLA_TEST_ALPHA"]),
    "getenv": lambda y: y + float(os.getenv(VARIABLE, "1")),
    "class method": lambda y: y + Config.lowest(),
    "one object": lambda y: y + Single().alpha,
    "order": lambda y: y + next(iter(in_order.values())),
    "doubles": lambda y: y + doubles[0],
    "other method": lambda y: nested.replaced(y),
}


def change(alpha):
    """Gives all places another value."""
    if settings["alpha"] != alpha:
        globals().update({name: made(alpha)[name] for name in ("tensor", "loss")})
    settings["alpha"] = space.alpha = slots.alpha = own.alpha = alpha
    nested.inner.alpha = nested.table["alpha"] = nested.rows[0][0] = alpha
    large["array"][-1] = large["list"][-1] = alpha
    numbers[0] = doubles[0] = of_thread.alpha = Single().alpha = alpha
    Config.base = script.ALPHA = script.TABLE["alpha"] = Layer.scale = alpha
    of_context.set(alpha)
    os.environ[VARIABLE] = str(alpha)
    in_order.move_to_end("first" if alpha == 1.0 else "second", last=False)
    Config.replaced = lambda self, y: y + alpha


def layer():
    torch.manual_seed(1)
    return Layer()


def compute(call, names):
    """What `call(function)` gives by name and value."""
    found = {}
    for name in names:
        found[name] = []
        for alpha in (1.0, 1.0, 4.0):
            change(alpha)
            settings["step"] += 1
            space.step += 1
            found[name].append(call(READERS[name]))
    change(1.0)
    return found


X = torch.ones(2, 5)


def compute_captured(names):
    smp.init({"microbatches": 1})
    raw = nn.Linear(5, 3)
    with torch.no_grad():
        raw.weight.fill_(0.3), raw.bias.fill_(-2.0)
    model = smp.DistributedModel(raw)

    def call(post):
        @smp.step
        def evaluate(model, x):
            return post(model(x))

        with logged() as lines:
            value = evaluate(model, X).outputs[0].cpu()
        return value, sum("compiled step" in line for line in lines)

    return compute(call, names)


@pytest.mark.slow
def test_wherever_settings_are_they_are_noticed():
    raw = nn.Linear(5, 3)
    with torch.no_grad():
        raw.weight.fill_(0.3), raw.bias.fill_(-2.0)
        expected = compute(lambda post: post(raw(X)), READERS)
    (found,) = run_ranks(compute_captured, 1, list(READERS))
    for name, calls in found.items():
        for (value, _), wanted in zip(calls, expected[name], strict=True):
            torch.testing.assert_close(value, wanted, msg=name)
        assert [count for _, count in calls][1:] == [0, 1], name


def read_what_is_too_large():
    smp.init({"microbatches": 1})
    model = smp.DistributedModel(nn.Linear(5, 3))
    objects = [object()] * 1_000

    @smp.step
    def evaluate(model, x):
        return model(x) * len(objects)

    with logged() as lines:
        evaluate(model, X)
    return [line for line in lines if "objects" in line]


def test_what_is_too_large_to_compare_is_named():
    ((line,),) = run_ranks(read_what_is_too_large, 1)
    assert "the step function names objects" in line
    assert "pass what changes as an argument" in line


def read_by_the_names_of_a_module():
    """In a step that is captured again, when it turns out to ask for a value."""
    smp.init({"microbatches": 1})
    model = smp.DistributedModel(nn.Linear(5, 3))

    @smp.step
    def evaluate(model, x):
        y = model(x)
        script.__dict__["TABLE"]["calls"] = None
        if len(x[x > 2]) > 1:
            return y
        return (0 * y).sum() + script.__dict__["ALPHA"]

    names, found = set(vars(script)), []
    for script.ALPHA in (1.0, 3.0):
        found.append(float(evaluate(model, X).outputs[0]))
    script.TABLE.pop("calls")
    script.ALPHA = 1.0
    return found, set(vars(script)) == names


def test_the_names_of_a_module_may_be_read_as_a_dictionary():
    assert run_ranks(read_by_the_names_of_a_module, 1) == [([1.0, 3.0], True)]


def change_in_a_model(raw, place):
    if place == 1:
        settings["alpha"] = 2.0
    elif place == 2:
        raw.config.alpha = 3.0
    elif place == 3:
        Layer.scale = 4.0
    elif place == 4:
        raw.options["alpha"] = 5.0
    elif place == 5:
        globals().update(tensor=torch.full((), 6.0))
    elif place == 6:
        raw.scale = 7.0


def change_in_a_captured_model():
    smp.init({"microbatches": 1})
    raw, found = layer(), []
    model = smp.DistributedModel(raw)
    step = smp.step(lambda model, x: model(x))
    for place in range(7):
        change_in_a_model(raw, place)
        with logged() as lines:
            found.append(step(model, X).outputs[0].cpu())
        found.append([line for line in lines if "compiled step" in line])
    change(1.0)
    return found


def test_what_the_methods_of_a_model_read_is_noticed():
    raw, expected = layer(), []
    for place in range(7):
        change_in_a_model(raw, place)
        expected.append(raw(X).detach())
    change(1.0)
    (found,) = run_ranks(change_in_a_captured_model, 1)
    for value, wanted in zip(found[::2], expected, strict=True):
        torch.testing.assert_close(value, wanted)
    reasons = [
        "first call",
        "settings['alpha'] changed from 1.0 to 2.0",
        "model.config.alpha changed from 1.0 to 3.0",
        "Layer.scale changed from 1.0 to 4.0",
        "model.options['alpha'] changed from 1.0 to 5.0",
        "the tensor tensor was replaced",
        "model.scale changed from nothing to 7.0",
    ]
    for (line,), reason in zip(found[1::2], reasons, strict=True):
        assert f"({reason})" in line
