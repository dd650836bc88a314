"""`assert not x.isnan().any()` in a step: captured for finite values, looked at in each call."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import StepError
from mpxla.tests.clients import logged
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def asserted(y):
    assert not torch.isnan(y).any(), "NaN"
    return y


def branched(y):
    if torch.isinf(y).sum() > 0 or not y.isfinite().all().item():
        return torch.zeros_like(y)
    return y * 2


def read(y):
    loss, array = float(y.detach().sum()), y.detach().mean().numpy()
    if (
        not math.isfinite(loss)
        or math.isnan(loss)
        or np.isinf(y.detach().max().item())
        or np.isnan(array)
    ):
        raise ValueError(f"the loss is {loss}")
    return y


def replaced(y):
    return torch.where(torch.isnan(y), 0.0, y)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


X = torch.ones(4, 4)


def loss_of(model, x):
    loss = model(x).square().mean()
    if torch.isnan(loss):
        raise ValueError("the loss is NaN")
    return loss


def train(num_stages, functions):
    smp.init({"microbatches": 2, "pipeline_parallel_degree": num_stages})

    @smp.step
    def step(model, x):
        loss = loss_of(model, x)
        model.backward(loss)
        return loss

    found = []
    bad = torch.cat([X[:3], X[3:] * float("inf")])
    for function in functions:
        model = smp.DistributedModel(Model(function))
        with logged() as lines:
            losses = step(model, X).stack().detach().cpu()
        line = next((line for line in lines if "is captured as if there were none" in line), "")
        try:
            step(model, bad)
        except StepError as error:
            found.append((losses, line, str(error)))
        else:
            found.append((losses, line, ""))
        step(model, X)
    return found


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_finite_values_go_on_and_others_are_an_error(num_stages):
    functions = [asserted, branched, read, replaced]
    ranks = run_ranks(train, num_stages, num_stages, functions)
    for function, *found in zip(functions, *ranks, strict=True):
        expected = torch.stack([loss_of(Model(function), x).detach() for x in X.chunk(2)])
        for losses, _, _ in found:
            torch.testing.assert_close(losses, expected)
        for _, _, text in found:
            assert (text == "") == (function is replaced)
            if text:
                assert "step: microbatch 1 has values that are NaN or infinite" in text
                assert "asks at " in text and "captured as if there were none" in text
    assert any("assert not torch.isnan(y).any()" in line for _, line, _ in ranks[0])


def test_inputs_are_looked_at_themselves():
    """What they are is known before the step, so that both ways can be taken."""
    first, second = run_ranks(repair, 1)[0]
    assert first == second == [4.0, 4.0]


def repair():
    smp.init({"microbatches": 2})

    @smp.step
    def evaluate(model, x):
        if x.isnan().any():
            x = torch.nan_to_num(x)
        return x.sum(1).max()

    model = smp.DistributedModel(nn.Linear(4, 4))
    bad = torch.cat([X, X[:, :1] * float("nan")], 1)
    return [[v.item() for v in evaluate(model, x).outputs] for x in (X, bad)]
