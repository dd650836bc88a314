"""Random numbers of Python and iterators in a step: what is captured once is not what was meant."""

import itertools
import random
import re
import threading
from random import uniform

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import mpxla as smp
from mpxla.errors import CaptureError
from mpxla.tests.clients import logged
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.wrong_uses import check_texts, made, refused

pytestmark = pytest.mark.ranks

generator = np.random.default_rng(0)
generators = {"noise": np.random.default_rng(0)}
batches = [torch.ones(4, 5), torch.zeros(4, 5)]
loader = DataLoader(batches, batch_size=None)
cycled = itertools.cycle(loader)
numbers = iter([1.0, 2.0])


def helper():
    return next(numbers)


class Trainer:
    def __init__(self):
        self.batches = itertools.cycle(batches)

    def own(self, model, x):
        return model(next(self.batches))

    def without(self, model, x):
        return model(x)


trainer = Trainer()


def by_bytes(model, x):
    return model(x) * random.getrandbits(4)


def by_name(model, x):
    return model(x) * uniform(0, 1)


def by_generator(model, x):
    return model(x) * generator.bytes(1)[0]


def by_one_of_several(model, x):
    return model(x) * generators["noise"].normal()


def by_torch(model, x):
    return model(x) * torch.rand(())


def beside(model, x):
    """Another thread loads data and draws while the step is captured."""

    def work():
        seen.extend(batch.sum() * random.random() for batch in loader)

    seen = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(seen) == 2
    return model(x)


DRAWING = {
    by_bytes: r"random numbers by random\.getrandbits at .*test_outside_sources\.py:\d+: return m",
    by_name: r"random numbers by a function of random or numpy\.random\. It is captured once",
    by_generator: r"random numbers by the generator generator\. It is captured once",
    by_one_of_several: r"by the generator generators\['noise'\]\. It is captured once",
}


def draw():
    model = made({"microbatches": 2})
    found = []
    before = random.random, np.random.randn, torch.rand
    for function in (*DRAWING, by_torch, trainer.without, beside):
        with logged() as lines:
            for _ in range(2):
                smp.step(function)(model, batches[0])
        found.append([line for line in lines if line.startswith("WARNING")])
    assert (random.random, np.random.randn, torch.rand) == before
    return found


def test_random_numbers_are_warned_of_with_the_line():
    (found,) = run_ranks(draw, 1)
    assert found[-3:] == [[], [], []]
    for pattern, warnings in zip(DRAWING.values(), found, strict=False):
        (line,) = warnings
        assert re.search(pattern, line), line


# Iterators.


def loop_over_a_loader(model, x):
    for batch in loader:
        return model(batch)


def next_of_a_loader(model, x):
    return model(next(iter(loader)))


def next_of_a_cycle(model, x):
    return model(next(cycled))


def next_in_a_helper(model, x):
    return model(x) * helper()


def closed_over():
    batches_left = (batch for batch in batches)

    def function(model, x):
        return model(next(batches_left))

    return function


def of_an_object(model, x):
    return model(next(trainer.batches))


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.noise = nn.Linear(5, 3), iter([1.0, 2.0])

    def forward(self, x):
        return self.layer(x) * next(self.noise)


def give(model, x, source):
    return model(next(source))


READING = {
    "loop": (loop_over_a_loader, r"reads a DataLoader at .*:\d+: for batch in loader:\. A step is"),
    "next": (next_of_a_loader, r"reads a DataLoader at .*:\d+: return model\(next\(iter"),
    "cycle": (next_of_a_cycle, r"reads the iterator cycled at .*: return model\(next\(cycled"),
    "helper": (next_in_a_helper, r"reads the iterator numbers at .*: return next\(numbers\)"),
    "closure": (closed_over(), r"reads the iterator batches_left at .*pass it to the step func"),
    "object": (of_an_object, r"reads the iterator trainer\.batches at "),
    "method": (trainer.own, r"reads the iterator self\.batches at "),
}


def read(name):
    model = made({"microbatches": 2})
    found = refused(lambda: smp.step(READING[name][0])(model, batches[0]))
    assert next(cycled).shape == (4, 5)
    assert next(trainer.batches).shape == (4, 5)
    return found


def read_otherwise():
    found = []
    model = made({"microbatches": 2})
    found.append(refused(lambda: smp.step(give)(model, batches[0], iter(batches))))
    smp.shutdown()
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(Reading())
    found.append(refused(lambda: smp.step(by_torch)(model, batches[0])))
    return found, [next(model.module.noise), next(iter(loader)).shape]


@pytest.mark.parametrize("name", READING)
def test_iterators_are_refused(name):
    check_texts(run_ranks(read, 1, name), CaptureError, READING[name][1])


def test_iterators_in_arguments_and_modules_are_refused():
    ((argument, attribute), after) = run_ranks(read_otherwise, 1)[0]
    check_texts([argument], CaptureError, r"reads the iterator in its argument \[0\]\[2\] at ")
    check_texts(
        [attribute], CaptureError, r"reads the iterator model\.noise at .*next\(self\.noise"
    )
    assert after == [1.0, (4, 5)]


def read_on_two():
    model = made()
    return refused(lambda: smp.step(loop_over_a_loader)(model, batches[0]))


def test_all_ranks_know_of_an_iterator():
    check_texts(run_ranks(read_on_two, 2), CaptureError, READING["loop"][1])
