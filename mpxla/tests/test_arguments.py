"""Arguments of step functions as real scripts pass them: what is split, and what makes a program.

Every use here once gave the numbers of another call, or of another microbatch.
"""

from argparse import Namespace
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

TWO = {"pipeline_parallel_degree": 2, "microbatches": 2}


def made():
    smp.init(TWO)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    return smp.DistributedModel(model)


def column(*values):
    return torch.tensor(values, dtype=torch.float32)[:, None]


class Encoding(UserDict):
    """Like a tokenizer's output: a mapping with attributes."""

    def __getattr__(self, name):
        return self["ids"] if name == "ids" else super().__getattribute__(name)


@dataclass
class Part:
    """What `smp_slice` may return: any object with tensors."""

    x: torch.Tensor
    more: dict[str, Any]


class Splittable:
    def __init__(self, x):
        self.x = x

    def smp_slice(self, num_mb, mb, axis):
        part = self.x.chunk(num_mb, axis)[mb]
        return Part(part, {"twice": part * 2, "name": "part"})


def values_of(output):
    return output.concat().flatten().tolist()


def pass_containers():
    model = made()

    @smp.step
    def mapping(model, batch):
        assert type(batch) is Encoding
        return model(batch.ids)

    @smp.step
    def sliced(model, part):
        assert type(part) is Part, type(part)
        assert part.more["name"] == "part"
        return model(part.x) + part.more["twice"]

    @smp.step
    def unordered(model, items):
        (item,) = items
        return model(item)

    found = []
    for values in ((1, 2, 3, 4), (5, 6, 7, 8)):
        x = column(*values)
        found.append(values_of(mapping(model, Encoding(ids=x))))
        found.append(values_of(sliced(model, Splittable(x))))
        found.append(values_of(unordered(model, {x})))
    return found


def test_tensors_in_any_container_are_inputs():
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    expected = [first, [3 * v for v in first], first, second, [3 * v for v in second], second]
    assert run_ranks(pass_containers, 2) == [expected] * 2


def pass_other_objects():
    model = made()

    @smp.step
    def step(model, x, args, criterion):
        return criterion(model(x)) * args.scale

    x, found = column(1, 2), []
    double, negate = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        double.weight.fill_(2)
        negate.weight.fill_(-1)
    with torch.no_grad():
        for criterion in (double, negate, double):
            found.append(values_of(step(model, x, Namespace(scale=1.0), criterion)))
        found.append(values_of(step(model, x, Namespace(scale=3.0), double)))
    return found, len(model._engine.calls.plans)


def test_another_object_is_another_program():
    found = [[2, 4], [-1, -2], [2, 4], [6, 12]]
    assert run_ranks(pass_other_objects, 2) == [(found, 3)] * 2


def change_objects_in_place():
    model = made()
    scales, space = np.ones(2), SimpleNamespace(scale=1.0)

    @smp.step(non_split_inputs=["scales", "space"])
    def step(model, x, scales, space):
        return model(x) * scales[0] * space.scale

    found = [values_of(step(model, column(1, 2), scales, space))]
    scales[0] = 2
    found.append(values_of(step(model, column(1, 2), scales, space)))
    space.scale = 3.0
    found.append(values_of(step(model, column(1, 2), scales, space)))
    return found


def test_what_changes_in_an_object_is_noticed():
    assert run_ranks(change_objects_in_place, 2) == [[[1, 2], [2, 4], [6, 12]]] * 2


def make_step(factor):
    @smp.step
    def step(model, x):
        return model(x) * factor

    return step


def call_functions_of_one_name():
    model, x = made(), column(1, 2)
    found = [values_of(make_step(factor)(model, x)) for factor in (2, 3, 2, 2)]
    return found, len(model._engine.calls.plans)


def test_functions_of_one_name_are_told_apart():
    """A function decorated anew in every epoch is the same program if it says the same."""
    found = [[2, 4], [3, 6], [2, 4], [2, 4]]
    assert run_ranks(call_functions_of_one_name, 2) == [(found, 2)] * 2


class Trainer:
    def __init__(self, factor):
        self.factor = factor

    @smp.step
    def step(self, model, x):
        return model(x) * self.factor


def call_methods_of_instances():
    model, x = made(), column(1, 2)
    trainers = [Trainer(2), Trainer(5)]
    found = [values_of(t.step(model, x)) for t in (*trainers, trainers[0])]
    return found, len(model._engine.calls.plans)


def test_methods_of_several_instances():
    assert run_ranks(call_methods_of_instances, 2) == [([[2, 4], [5, 10], [2, 4]], 2)] * 2


def pass_numbers():
    model = made()

    @smp.step
    def step(model, x, power):
        return model(x), torch.arange(2) * power

    found = []
    for power in (1, 1.0, True, 2):
        _, product = step(model, column(1, 2), power)
        found.append(str(product.outputs[0].dtype).removeprefix("torch."))
    return found


def test_equal_numbers_of_other_types_are_other_programs():
    assert run_ranks(pass_numbers, 2) == [["int64", "float32", "int64", "int64"]] * 2


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 1)

    def forward(self, x):
        return self.third(self.second(self.first(x)).relu())


def pad_dynamically():
    """Replicas see batches of other lengths, and so other costs, in every step."""
    smp.init({**TWO, "ddp": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(Embedding())

    @smp.step
    def step(model, x):
        loss = model(x).mean()
        model.backward(loss)
        return loss

    for lengths in ((2, 64), (7, 3)):
        model.module.zero_grad()
        step(model, torch.ones(2, lengths[smp.dp_rank()], 3))
    return {name: p.grad.cpu() for name, p in model.local_named_parameters()}


def test_replicas_may_have_batches_of_other_shapes():
    torch.manual_seed(0)
    plain = Embedding()
    plain(torch.ones(1, 1, 3)).mean().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    first, second, third, fourth = run_ranks(pad_dynamically, 4)
    assert first.keys() == third.keys()
    assert second.keys() == fourth.keys()
    assert first.keys() | second.keys() == expected.keys()
    for found in (first, second, third, fourth):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
