"""Rows that masks choose are put in order, and read and written by their numbers, as in PyTorch.

As in `test_chosen.py`, each function is captured once and run with several masks.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from mpxla.graph.stepgraph import Check
from mpxla.tests.graph.capture.test_capture import outputs_of
from mpxla.tests.graph.chosen.test_chosen import LABELS, capture, captured, numbers, plain, slow

pytestmark = pytest.mark.unit


def in_order(m, h, y):
    v, flat = h[y > 3], h[y > 3].flatten()
    ordered, place = v.sort(0, descending=True)
    weights = torch.arange(v.shape[0])[:, None] + 1
    by_first = v[:, 0].argsort()
    return (
        (ordered * weights).sum()
        + (ordered.cumsum(0) * place).mean()
        + (v[by_first] * weights).sum()
        + (m.head(v)[by_first].flip(0) * weights).sum()
        + (v.gather(0, place) - ordered).square().sum()
        + (flat.sort(stable=True).values * torch.arange(flat.shape[0])).sum()
    )


def greatest(m, h, y):
    v = h[y > 3]
    values, place = v.topk(1, 0)
    flat, at = v.flatten().topk(5)
    least = v.flatten().topk(2, largest=False)[0]
    half, half_at = v.flatten().topk(v.shape[0] * 4)
    largest, where = v.max(0)
    return (
        values.square().sum()
        + (flat * torch.arange(5) * at).sum()
        + least.sum()
        + v.gather(0, place).sum()
        + (half.square() * half_at).mean()
        + (largest * (where + 1)).sum()
        + m.head(v[where]).sum()
        + v.min(0, keepdim=True).values.sum()
        + (v.argmax(0) * h[0, 0]).sum()
        + v.flatten().argmin() * h.sum()
    )


def middle(m, h, y):
    v = h[y > 3]
    scale = torch.median(v.flatten())
    return ((v - scale).abs().mean() + scale) * 2


def by_number(m, h, y):
    v, labels = h[y > 3], y[y > 3]
    return (
        v[-1].square().sum()
        + v[torch.tensor([0, -1, 0])].sin().sum()
        + m.head(v)[torch.zeros_like(labels), labels].sum()
        + v.index_select(0, torch.tensor([0])).exp().sum()
    )


def distinct(m, h, y):
    rows = h.view(-1, 8)
    found, number, count = y.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(found), 8).index_add(0, number.flatten(), rows)
    same = torch.zeros(len(found), 8).scatter_add(0, number.view(-1, 1).expand(-1, 8), rows)
    means = sums / count[:, None]
    turns, length = torch.unique_consecutive(y, return_counts=True)
    return (
        (means * found[:, None]).square().mean()
        + F.mse_loss(rows, means[number.flatten()])
        + (m.first.weight.sum() * turns * length).sum()
        + same.exp().mean()
    )


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize(
    "function", [greatest, *slow([distinct, in_order, middle, by_number])], ids=lambda f: f.__name__
)
def test_values_and_gradients(function):
    model, step, known = capture(function)
    assert known is None and not step.prints
    for kind, labels in LABELS.items():
        given = torch.randn(3, 5, 8), torch.tensor(labels)
        try:
            expected = numbers(model, plain(function, model), given)
        except (IndexError, RuntimeError):
            assert kind == "none"
            continue
        found = numbers(model, captured(model, step), given)
        for mine, torchs in zip(found, expected, strict=True):
            zero = torch.zeros(()) if torchs is None else torchs
            mine, zero = torch.broadcast_tensors(torch.zeros(()) if mine is None else mine, zero)
            torch.testing.assert_close(mine, zero, equal_nan=True, msg=f"{kind}")


def test_what_is_not_finite_stays_in_its_place():
    def several(m, h, y):
        v = h[y > 3][:, 0] + torch.tensor(-math.inf).where(h[y > 3][:, 0] > 0, 0.0)
        return v.sort(descending=True)[0].nan_to_num(neginf=-3.0).mul(y[y > 3]).sum()

    model, step, _ = capture(several)
    given = torch.randn(3, 5, 8), torch.tensor(LABELS["some"])
    expected = numbers(model, plain(several, model), given)
    torch.testing.assert_close(numbers(model, captured(model, step), given)[0], expected[0])


def test_more_than_there_are_is_nan():
    model, step, _ = capture(lambda m, h, y: h[y > 3].topk(2, 0)[0].sum())
    with torch.no_grad():
        for kind, is_nan in (("some", False), ("one", True), ("none", True)):
            given = torch.randn(3, 5, 8), torch.tensor(LABELS[kind])
            assert outputs_of(step, model, given)[0].isnan() == is_nan


# --- numbers of values ----------------------------------------------------------------------------


def classes(m, h, y):
    predicted = m.head(h).argmax(-1)
    known = y > 3
    table = torch.bincount(10 * y[known] + predicted[known], minlength=100).reshape(10, 10)
    weights = torch.bincount(y.flatten(), minlength=12)[:10] + 1.0
    by_loss = y.flatten().bincount(h.detach().sum(-1).flatten(), 10)
    loss = F.cross_entropy(m.head(h).flatten(0, 1), y.flatten(), 1 / weights)
    return loss + (table * m.head.weight.sum()).mean() + (by_loss * h.mean()).sum()


def test_occurrences_are_counted():
    model, step, known = capture(classes)
    assert known is None and [check.check for check in step.prints] == [Check.COUNTED] * 3
    assert all("torch.bincount" in c.label or ".bincount(" in c.label for c in step.prints)
    for labels in LABELS.values():
        given = torch.randn(3, 5, 8), torch.tensor(labels)
        expected = numbers(model, plain(classes, model), given)
        found = numbers(model, lambda *x: outputs_of(step, model, x)[0], given)
        torch.testing.assert_close(found, expected)


def test_values_without_a_place_are_found():
    model, step, _ = capture(lambda m, h, y: y[y > 3].bincount(minlength=12).sum() * h.sum())
    for value, is_there in ((11, True), (12, False), (-1, True)):
        given = torch.randn(3, 5, 8), torch.tensor(LABELS["some"])
        given[1][0, 0] = value
        with torch.no_grad():
            assert outputs_of(step, model, given)[-1] == is_there


def test_one_hot_of_inputs_depends_on_their_greatest_only():
    _, step, known = capture(lambda m, h, y: F.one_hot(y).sum(0).sum() * h.sum())
    assert known is not None
    other = torch.tensor(LABELS["all"])
    assert step.decisions.follow([torch.randn(3, 5, 8), other])[0] is None
    other[0, 0] = 11
    assert "from 10 to 12" in step.decisions.follow([torch.randn(3, 5, 8), other])[0]
