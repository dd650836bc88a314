"""Rows that masks choose are put back in order, and meet what is as many: as in PyTorch.

As in `test_chosen.py`, each function is captured once and run with several masks.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from mpxla.errors import CaptureError
from mpxla.tests.graph.chosen.test_chosen import (
    LABELS,
    capture,
    captured,
    check_values_and_gradients,
    numbers,
    plain,
    slow,
)

pytestmark = pytest.mark.unit


def filled_in_order(m, h, y):
    mask = y > 3
    rows, flat = m.first(h[mask]).tanh(), torch.zeros(3, 5)
    wide, some = mask[..., None], m.head(h[mask]).sum(-1)
    both = torch.cat([h[mask].sin(), h[~mask]])
    return (
        (h.masked_scatter(wide, rows) * h).sum()
        + (h.masked_scatter(wide.expand_as(h), rows) * h).mean()
        + (flat.masked_scatter_(mask, some) * h[..., 0]).sum()
        + (h.masked_scatter(wide, rows.flatten()) * h).std()
        + (h.masked_scatter(wide.flip(0), rows) * h).square().mean()
        + (h.masked_scatter(h.detach() > 0, both) * h).mean()
    )


def another_mask(m, h, y):
    out = h.flatten(0, 1).clone()
    out[(y.flatten() > 3).flip(0)] = h[y > 3].cos()
    out.index_put_(((y.flatten() > 3).roll(2),), m.first(h[y > 3]), accumulate=True)
    return (out.view_as(h) * h).sum()


def pairs(m, h, y):
    rows = h[y > 3]
    num = len(rows)
    scores = rows @ m.first(rows).T
    alone = scores.masked_fill(torch.eye(num, dtype=torch.bool), -9.0)
    return (
        alone.softmax(-1).square().sum()
        + (scores * (1 - torch.eye(num, 3 * 5).sum(1))).mean()
        + (scores.triu(1) + scores.tril(-2).sin()).sum()
        + torch.triu(torch.ones(num, num), diagonal=1).sum() * h.mean()
    )


def labels_that_number_rows(m, h, y):
    rows = h[y > 3]
    scores, numbers = rows @ m.first(rows).T, torch.arange(len(rows))
    last = torch.where(numbers == 0, -100, -1 - numbers + len(rows))
    return (
        F.cross_entropy(scores, numbers)
        + F.cross_entropy(scores.T, last, reduction="sum")
        + F.nll_loss((scores - 1).log_softmax(-1), numbers, reduction="none").square().sum()
    )


def counted_otherwise(m, h, y):
    rows = h[y > 3]
    num = len(rows)
    return (rows * torch.arange(1, num + 1)[:, None]).sum() + (
        torch.arange(num, 3 * num, 2, dtype=torch.float32) * rows[:, 0]
    ).sum()


def repeated(m, h, y):
    rows = h[y > 3]
    num = len(rows)
    first = m.first.bias.repeat(num, 1) * rows
    return first.sum() + (h[:1, 0].repeat(num, 2) * rows.repeat(1, 2)).square().sum()


def greatest_of_all(m, h, y):
    num = len(h[y > 3])
    values, places = h.flatten().topk(num)
    hard = h.flatten().topk(min(3 * num, 7), largest=False).values
    return (values * (1 + places)).sum() + num * h.mean() + hard.square().sum()


def permuted(m, h, y):
    rows, numbers = h[y > 3], torch.randperm(len(h[y > 3]))
    weights = torch.arange(len(rows), dtype=torch.float32)
    return (rows[numbers].square().sum(0) * m.first.bias).sum() + (
        (numbers.sort().values - weights).abs().sum() * h.mean()
    )


def divided_and_joined(m, h, y):
    flat, labels = h.flatten(0, 1), y.flatten()
    order = labels.argsort(stable=True)
    rows, labels = flat[order], labels[order]
    counts = F.one_hot(labels, 10).sum(0)
    sizes, ends = counts.tolist(), counts.cumsum(0)[:-1]
    parts = zip(rows.split(sizes), torch.split(labels, sizes), strict=True)
    made = torch.cat([m.first(part) * own[:, None] + i for i, (part, own) in enumerate(parts)])
    columns = torch.split(rows.T, split_size_or_sections=sizes, dim=-1)
    mean = torch.cat([part.cos() * (i + 1) for i, part in enumerate(columns)], -1)
    several = torch.concat([part.square() for part in rows.tensor_split(ends)][::-1])
    return (made * rows).sum() + (mean.T * made).mean() + several.mean()


def stacked(m, h, y):
    some, others = h[y > 3], h[y < 2].sin()
    wide = torch.hstack([some, some.cos()]).square().mean() + torch.vstack([some, others]).std()
    deep = torch.dstack([some, some.cos()]) * torch.arange(2)
    flat = torch.hstack([some[:, 0], others[:, 0]]).square().mean()
    columns = torch.column_stack([some[:, 0], some[:, 1:3]]) * torch.arange(3)
    return wide + deep.sum() + flat + columns.sum() + torch.concat([some, others]).exp().sum()


def rows_put_in_order(m, h, y):
    rows = h[y > 3]
    order, num = rows[:, 0].argsort(), len(rows)
    place = torch.full((num,), -1)
    place[order] = torch.arange(num)
    made, summed = torch.zeros_like(rows), m.first(rows)
    made[order] = rows.sin()
    summed.index_put_((order,), rows.cos(), accumulate=True)
    copied = m.first(rows).index_copy(0, order, rows.exp())
    wide = m.first(rows).scatter(0, order[:, None].expand(-1, 8), made * 2)
    fixed = torch.arange(num).scatter_(0, torch.arange(num), place.flip(0))
    ones = torch.zeros(num).scatter(0, order, 1.0)
    out = torch.zeros(15, 8).scatter(0, place[:, None].expand(-1, 8), rows)
    return (
        (made * rows * place[:, None]).sum()
        + (summed.square() + copied * wide).mean(0).sum()
        + (rows * fixed[:, None] * ones[:, None]).sum()
        + (out * h.flatten(0, 1)).sum()
    )


def edges_of_chosen_nodes(m, h, y):
    """As poolings of graphs do."""
    nodes = (y.flatten() > 3).nonzero().view(-1)
    number = nodes.new_full((15,), -1)
    number[nodes] = torch.arange(len(nodes))
    row, column = number[torch.arange(15)], number[torch.arange(15).roll(2)]
    both = (row >= 0) & (column >= 0)
    edges = torch.stack([row[both], column[both]])
    rows = m.first(h.flatten(0, 1)[nodes])
    again = rows[edges[0]].sin() * edges[1][:, None]
    return rows.new_zeros(len(nodes), 8).index_add(0, edges[1], again).square().sum()


def written_one_by_one(m, h, y):
    """Ones in place of zeros, of which the logarithm has no slope."""
    rows = m.first(h[y > 3]).exp() * torch.tensor([0.0, *[1.0] * 7])
    is_low = rows < 0.1
    rows[is_low] = rows[is_low] + 1
    return rows.log().sum()


FAST = [
    rows_put_in_order,
    edges_of_chosen_nodes,
    written_one_by_one,
    divided_and_joined,
    filled_in_order,
    another_mask,
    labels_that_number_rows,
]
MORE = [pairs, stacked, counted_otherwise, repeated, greatest_of_all, permuted]


@pytest.mark.parametrize("function", [*FAST, *slow(MORE)], ids=lambda f: f.__name__)
def test_rows_that_meet(function):
    check_values_and_gradients(function)


def test_a_permutation_of_rows_is_drawn():
    model, step, _ = capture(lambda m, h, y: torch.randperm(len(h[y > 3])).argmax() + h.sum() * 0)
    given = torch.randn(3, 5, 8), torch.tensor(LABELS["some"])
    drawn = {int(captured(model, step)(*given).detach()) for _ in range(60)}
    assert drawn == set(range(int((given[1] > 3).sum())))


def as_many(m, h, y):
    out = h.clone()
    out[y < 3] = h[y > 3]
    return (out * h).sum()


def more_than_there_are(m, h, y):
    return h.masked_scatter((y > 3)[..., None], h[y < 3]).sum()


def beyond(m, h, y):
    rows = m.first(h[y > 3]) * 1
    rows[torch.tensor([0, 5])] = 2.0
    return rows.sum()


@pytest.mark.parametrize("function", [as_many, more_than_there_are, beyond])
def test_numbers_are_marked_where_torch_raises(function):
    model, step, known = capture(function)
    assert known is None
    several = [[0] * 5, [4] * 5, [5] * 5]
    few = [[0] * 5, [4] * 5, [0] * 5]
    labels = few if function is beyond else several
    given = torch.randn(3, 5, 8), torch.tensor(labels)
    with pytest.raises((RuntimeError, IndexError)):
        numbers(model, plain(function, model), given)
    assert captured(model, step)(*given).isnan()


def first_and_last(m, h, y):
    rows = m.first(h[y > 3]) * 1
    rows[0] = 2.0
    rows = rows.select_scatter(m.first(h[0, 3]).sin(), 0, -1)
    rows[torch.tensor([1, 0]), 1] = h[0, :2, 0]
    return (rows.softmax(0) * h[y > 3]).sum()


def test_rows_of_fixed_numbers_are_written():
    model, step, _ = capture(first_and_last)
    for name in ("some", "all"):
        given = torch.randn(3, 5, 8), torch.tensor(LABELS[name])
        expected = numbers(model, plain(first_and_last, model), given)
        torch.testing.assert_close(numbers(model, captured(model, step), given), expected)


def chosen(h):
    return h[h[..., 0] > 0]


REFUSED = {
    "is a dim of classes": lambda m, h, y: F.cross_entropy(
        chosen(h) @ chosen(h).T, torch.arange(len(chosen(h))), label_smoothing=0.1
    ),
    "meets an operator": lambda m, h, y: pad_sequence([chosen(h), chosen(h)]).sum(),
    "is how often": lambda m, h, y: h[0].repeat(len(chosen(h)), 1).sum(),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text):
    with pytest.raises(CaptureError, match=rf"aten::\w+ in .*{text}"):
        capture(REFUSED[text])
