"""Models whose masks choose rows train as in PyTorch, with other masks in every microbatch."""

import logging
import re

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import StepError
from mpxla.graph.capture import step as capturing
from mpxla.tests.clients import train_each, train_each_plainly
from mpxla.tests.graph.chosen.test_chosen import (
    Model,
    asked,
    at_places,
    attended,
    counts,
    experts_by_masks,
    experts_by_one_hot,
    experts_counted,
    labels_chosen_twice,
    of_each_row_as_many,
    shapes,
    slices,
    writes,
)
from mpxla.tests.graph.chosen.test_order import by_number, classes, distinct, greatest, in_order
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

EXPERTS = [experts_by_masks]
OTHERS = [
    experts_by_one_hot,
    labels_chosen_twice,
    counts,
    writes,
    shapes,
    asked,
    of_each_row_as_many,
    by_number,
    in_order,
    greatest,
    distinct,
    classes,
    at_places,
    slices,
    attended,
]


class Trained(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.model, self.function = Model(), function

    def forward(self, x, y):
        return self.function(self.model, self.model.first(x), y)


def batch(number):
    draw = torch.Generator().manual_seed(number)
    return torch.randn(6, 5, 8, generator=draw), torch.randint(0, 10, (6, 5), generator=draw)


def given(functions):
    """Models, made when they are asked for, and what else decides their training."""
    return (Trained(f) for f in functions), [*map(batch, range(3))], 0.002


def train(num_stages, functions):
    return train_each(num_stages, *given(functions))


@pytest.mark.parametrize(
    ("num_stages", "functions"),
    [
        (1, EXPERTS),
        pytest.param(2, EXPERTS, marks=pytest.mark.slow),
        pytest.param(2, OTHERS, marks=pytest.mark.slow),
    ],
)
def test_trains_as_plain_torch(num_stages, functions):
    plain = train_each_plainly(*given(functions))
    for found in run_ranks(train, num_stages, num_stages, functions, timeout_s=300.0):
        for function, own, others in zip(functions, found, plain, strict=True):
            (losses, state), (wanted, parameters), name = own, others, function.__name__
            torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5, msg=name)
            torch.testing.assert_close(state, parameters, rtol=1e-4, atol=1e-5, msg=name)


def ask():
    capturing.MOST_MASKS = 2  # three masks are too many to ask
    smp.init({"microbatches": 2})
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mpxla").addHandler(handler)
    model = smp.DistributedModel(Trained(experts_counted))

    @smp.step
    def step(model, x, y):
        model.backward(model(x, y))

    @smp.step
    def count(model, x, y):
        return torch.bincount(y.flatten(), minlength=9)

    @smp.step
    def checked(model, x, y):
        loss = model(x, y)
        scores = model.module.model.gate(model.module.model.first(x))
        if (scores > 50).any():
            raise ValueError("too large")
        assert torch.all(scores >= -50), "too small"
        model.backward(loss)
        return loss

    gate = model.module.model.gate
    with torch.no_grad():
        gate.weight.zero_(), gate.bias.zero_()
        gate.weight[:, :3] = torch.eye(3)
    step(model, *batch(0))
    with torch.no_grad():
        gate.bias[1] = -100.0
    with pytest.raises(StepError) as error:
        step(model, *batch(1))
    with pytest.raises(StepError) as counted:
        count(model, *batch(1))
    with torch.no_grad():
        gate.bias[1] = 0.0
    assert checked(model, *batch(0)).reduce_mean().isfinite()
    with torch.no_grad():
        gate.bias[1] = 100.0
    with pytest.raises(StepError) as large:
        checked(model, *batch(0))
    with torch.no_grad():
        gate.bias[1] = -100.0
    with pytest.raises(StepError) as small:
        checked(model, *batch(0))
    return str(error.value), str(counted.value), str(large.value), str(small.value), lines


def test_a_branch_that_was_not_captured_is_an_error():
    ((text, counted, large, small, lines),) = run_ranks(ask, 1)
    line = r"at \S*test_chosen.py:\d+: if mask.any\(\):"
    assert re.search(rf"step: microbatch 0 has a mask that is true nowhere, .* asks {line}", text)
    assert "To train on, compute without the branch" in text
    (told,) = [line for line in lines if "It is captured as if it were," in line]
    assert re.search(rf"asks {line} whether a mask is true anywhere", told)
    assert any("is computed for all 15 rows" in line for line in lines)
    line = r"at \S*test_masked_rows.py:\d+: return torch.bincount"
    assert re.search(rf"count: microbatch \d has a value below zero, .* counts {line}", counted)
    asks = r"raises an exception at \S*test_masked_rows.py:\d+: "
    for raised, what in ((large, r"if \(scores > 50\).any"), (small, r"assert torch.all\(scores")):
        assert re.search(f"checked: microbatch 0 has a mask for which .* {asks}{what}", raised)
        assert any(re.search(asks + what, told) for told in lines)
    assert any("It is captured as if it did not, and every step" in line for line in lines)
    assert not any("checked branches" in line for line in lines), "no forward goes ahead"
    (told,) = [line for line in lines if "It is captured as if all were below the minl" in line]
    assert re.search(rf"the step function counts values {line}", told)
