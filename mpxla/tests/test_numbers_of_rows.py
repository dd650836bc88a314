"""Steps that compute in Python with numbers of rows that masks choose: as plain PyTorch."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from mpxla.tests.clients import train_each, train_each_plainly
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 3
LABELS = [
    [0, 1, 0, 2, 0, 0, 2, 0, 0, 0, 1, 1],
    [0, 0, 0, 1, 2, 2, 0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, 1, 1, 2, 1, 0, 1],
]
"""Of two microbatches of six each; the rows of those above zero are chosen."""


def zero_without_rows(model, h, mask, y):
    rows = h[mask]
    if len(rows) == 0:
        return h.sum() * 0
    return rows.square().mean()


def other_head_without_rows(model, h, mask, y):
    places = mask.nonzero().squeeze(1)
    num = places.numel()
    loss = h.square().mean() if num > 0 else model.last(h).mean()
    return loss / max(1, num)


def truths(model, h, mask, y):
    num, others = len(h[mask]), len(h[~mask])
    loss = (num > 0) * h.square().sum() + h.mean() * (1 - (others > 4))
    loss = loss + ((num > 1) + (num > 2)) * model.last(h).mean() / 3
    return loss + sum(n > 2 for n in (num, others)) * (num > 1 and num < 5) * h.std()


def functions_of_numbers(model, h, mask, y):
    num, others = len(h[mask]), len(h[~mask])
    loss = h.sum() / math.sqrt(num + 1) + h.mean() * math.log1p(num) * math.ceil(num / 4)
    loss = loss + h.std() * (round(num / 3, 1) + abs(num - 3) + num % 4 + 0.9**num)
    loss = loss * (np.ceil(num / 2) + np.sqrt(num + 1))
    quotient, rest = divmod(others, 4)
    return loss + h.var() * (quotient - rest) * (num // 2)


def extremes(model, h, mask, y):
    num, others = len(h[mask]), len(h[~mask])
    loss = h.sum() / max(num / 2, 1.0) + h.mean() * max(num, others, 3) + h.std() * min(num, 4)
    return loss + h.var() * max([num, others, 2])


def tensors(model, h, mask, y):
    num, others = len(h[mask]), len(h[~mask])
    weights = torch.tensor([num, others], dtype=h.dtype) + h.new_tensor([others, 1.5])
    loss = (h[:, :2] * weights).sum() * torch.tensor(num > 2)
    loss = loss / torch.as_tensor(num).clamp(min=1)
    return num - loss + h.std() * h.new_tensor(num) ** num + h.var().clamp(max=num)


def slices_read(model, h, mask, y):
    rows, others = h[mask], h[~mask]
    num, few = len(rows), min(len(rows), 2)
    loss = h.mean() + others[:num].square().sum() + h[num:].sin().sum() + h[1 : num - 1].sum()
    loss = loss + (rows[:2] * y[mask][:2, None]).sum() + h[mask.nonzero()[:few, 0]].exp().sum()
    hard = others.sum(1).sort(descending=True).values[: 2 * max(num, 1)]
    return loss + hard.sum() + rows[: num // 2].sum() + rows[-1:].sum() + (h[:num] * rows).sum()


def slices_written(model, h, mask, y):
    rows, padded = h[mask], torch.zeros(2, 6, 5)
    num = len(rows)
    padded[0, :num] = rows
    padded[1, :num, :2] += 2 * h[:num, :2]
    padded[1, num:] = 3.0
    rows = 2 * rows
    rows[:1] = 0.0
    return (padded * h).sum() + rows.square().sum()


def asked_for(model, h, mask, y):
    rows = h[mask]
    loss = h.mean() * float(len(rows) > 1)
    return loss + h.std() * {0: 1.5, 3: 2.5}.get(len(rows), 0.5) + rows.square().sum()


def values_taken(model, h, mask, y):
    count = len(h[mask])
    return h.square().sum() / (count + 1) + h.std() * (int(count > 2) + float(count) / 2)


def turns(model, h, mask, y):
    rows, loss = h[mask], h.mean()
    for row in range(len(rows)):
        loss = loss + h[row].sum() * (row + 1)
    return loss


def one_by_one(model, h, mask, y):
    loss = h.mean() + torch.stack([row.sum() for row in h[mask]] + [h.std()]).sin().sum()
    for place in mask.nonzero().flatten().tolist():
        loss = loss + h[place].square().sum() * (place + 1)
    return loss + sum(row.exp().sum() * i for i, row in enumerate(h[~mask].unbind()))


COMPUTED = [
    truths,
    functions_of_numbers,
    extremes,
    tensors,
    slices_read,
    slices_written,
    values_taken,
]
ASKED = [asked_for, turns, one_by_one]


def leaf_without_rows(model, h, mask, y):
    total, num = torch.tensor(0.0, requires_grad=True), 0
    for label in (1, 2):
        rows = h[mask & (y == label)]
        if len(rows) == 0:
            continue
        total, num = total + model.last(rows).square().mean(), num + 1
    return total / max(num, 1)


WAYS = [leaf_without_rows, zero_without_rows, other_head_without_rows]


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 1)
        self.function = function

    def forward(self, x, y):
        h = self.first(x).tanh()
        mask = (0 * h.detach().sum(1) + y) > 0  # that of the labels, which depends on the model
        return self.function(self, h, mask, y)


def batch(number):
    draw = torch.Generator().manual_seed(number)
    return torch.randn(12, 4, generator=draw), torch.tensor(LABELS[number])


def given(functions):
    """Models, made when they are asked for, and what else decides their training."""
    return (Net(f) for f in functions), [*map(batch, range(NUM_STEPS))], 0.01


def train(num_stages, functions):
    torch.set_default_dtype(torch.float64)
    try:
        return train_each(num_stages, *given(functions))
    finally:
        torch.set_default_dtype(torch.float32)


def expected(functions):
    torch.set_default_dtype(torch.float64)
    try:
        return train_each_plainly(*given(functions))
    finally:
        torch.set_default_dtype(torch.float32)


def check_trains(num_stages, functions):
    wanted = expected(functions)
    for found in run_ranks(train, num_stages, num_stages, functions, timeout_s=300.0):
        for function, own, plain in zip(functions, found, wanted, strict=True):
            torch.testing.assert_close(
                own, plain, rtol=1e-9, atol=1e-10, msg=lambda m, f=function: f"{f.__name__}: {m}"
            )


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_models_of_one_step_function_ask_for_their_own_masks(stages):
    check_trains(stages, WAYS)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_python_computes_with_numbers_of_rows(stages):
    check_trains(stages, COMPUTED)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_python_asks_for_numbers_of_rows(stages):
    check_trains(stages, ASKED)
