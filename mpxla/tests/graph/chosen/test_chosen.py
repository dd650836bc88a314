"""What masks choose has a size that depends on values; the graph has one size and the same numbers.

Each function is captured once, and the graph run with masks that are true in some places, one, all
and none.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.errors import CaptureError
from mpxla.graph.capture.known import Known, with_values_if_needed
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.graph.stepgraph import Check
from mpxla.runtime.state import ModelState
from mpxla.tests.clients import logged
from mpxla.tests.graph.capture.test_capture import outputs_of

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:(var|std).*degrees of freedom")]

LABELS = {
    "some": [[4, 0, 6, 1, 5], [3, 9, 2, 1, 7], [0, 0, 4, 8, 2]],
    "one": [[0, 0, 0, 0, 0], [0, 0, 0, 7, 0], [0, 0, 0, 0, 0]],
    "all": [[4, 5, 6, 4, 5], [9, 9, 5, 4, 7], [6, 8, 4, 8, 4]],
    "none": [[0, 1, 2, 3, 0], [3, 3, 2, 1, 1], [0, 0, 2, 0, 2]],
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 10)
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8)) for _ in range(3)
        )


# --- one after the other, h [3, 5, 8] and the mask y > 3 ------------------------------------------


def labels_chosen_twice(m, h, y):
    """Of two masks that are computed the same way."""
    return F.cross_entropy(m.head(h)[y > 3], y[y > 3])


def losses(m, h, y):
    a, b = h[y > 3], h.detach().flip(0)[y > 3]
    scores, labels = m.head(a), y[y > 3]
    return (
        F.mse_loss(a, b)
        + F.l1_loss(a, b, reduction="sum")
        + F.smooth_l1_loss(a, b, reduction="none").mean(-1).sum()
        + F.huber_loss(a, b)
        + F.binary_cross_entropy_with_logits(a, (b > 0).float())
        + F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")
        + F.nll_loss(scores.log_softmax(-1), labels)
        + F.cross_entropy(scores, labels, label_smoothing=0.1, reduction="sum")
        + F.cross_entropy(scores, labels, reduction="none").square().sum()
        + F.cosine_similarity(a, b).mean()
        + F.pairwise_distance(a, b).mean()
        + F.pairwise_distance(a, b[:, None], keepdim=True).square().sum()
    )


def sums(m, h, y):
    v = h[y > 3]
    return (
        v.sum()
        + v.mean(0).square().sum()
        + v.mean(0, keepdim=True).sum()
        + v.mean((0, 1))
        + v.square().sum((0, 1)).sqrt()
        + (v > 0).any(0).sum()
        + (v > -9).all(0).sum()
        + v.sigmoid().prod(0).sum()
        + v.norm()
        + v.logsumexp(0).logsumexp(0)
    )


def extremes(m, h, y):
    v = h[y > 3]
    return v.max() + v.min() + v.amax(0).sum() + v.amin((0, 1)) + v.max(1)[0].sum()


def spreads(m, h, y):
    v = h[y > 3]
    return v.var(0).sum() + v.std() + v.var(unbiased=False) + v.std(0, correction=0).sum()


def counts(m, h, y):
    mask = y > 3
    v = h[mask]
    n = v.shape[0]
    return (
        v.sum() / max(n, 1)
        + h.mean() * v.numel()
        + (n + 2) * n**0.5 * h.sum()
        + (h * mask[..., None]).sum() / mask.sum().item() ** 2
        + v.sum() / mask.sum().clamp(min=1)
        + (v * torch.full((n, 1), n / 2)).sum()
    )


def places(m, h, y):
    rows, columns = torch.where(y > 3)
    at = (y > 3).nonzero()
    both = (y > 3).nonzero(as_tuple=True)
    flat = torch.nonzero(y.flatten() > 3).squeeze(1)
    return (
        h[rows, columns].square().sum()
        + h[at[:, 0], at[:, 1]].sin().sum()
        + h[both][..., 0].sum()
        + (m.head.weight[rows, :].sum(-1) * columns).sum()
        + h.view(-1, 8)[flat].exp().sum()
        + torch.argwhere(y > 3).float().mul(h.mean()).sum()
        + h.view(-1, 8).index_select(0, flat).tanh().sum()
        + h.masked_select((y > 3)[..., None]).cos().sum()
    )


def expanded(m, h, y):
    """Masks that repeat along the last dims choose rows, as in losses of detectors."""
    mask, scores, other = y > 3, m.head(h), h.detach().sin()
    full, of_model = mask.unsqueeze(2).expand_as(h), (h[..., :1] > 0).expand_as(h)
    other[full] = 2 * h[full]
    other[of_model] = h[of_model] - other[of_model]
    return (
        F.cross_entropy(scores[mask[..., None].expand_as(scores)].view(-1, 10), y[mask])
        + F.cross_entropy(scores.masked_select(mask[..., None]).view(-1, 10), y[mask])
        + (h[of_model].view(-1, 8) - 3).norm(dim=1).sum()
        + torch.stack([h, h.exp()], -1)[full].view(-1, 8, 2).norm(dim=1).sum()
        + (other.square() * h).sum()
    )


def first_rows(m, h, y):
    return h[y > 3][0].square().sum() + h.view(-1, 8)[(y.flatten() > 3).nonzero()[0, 0]].sum()


def at_places(m, h, y):
    """Rows are read by their numbers, from either end."""
    v, number = h[y > 3], torch.tensor([0, -1, 0])
    return (
        v[number].square().sum()
        + v[-1].sin().sum()
        + v[number, 2].sum()
        + v.gather(0, number[:2, None].abs() * torch.zeros(1, 8).long()).sum()
        + v.index_select(0, number.abs() - number.abs()).exp().sum()
        + (v.max(0)[0] * v.argmin(0)).sum()
    )


def slices(m, h, y):
    """They end at what follows from values; labels have as many as there are rows."""
    count, last = (y[0] > 3).sum(), y[1].max().item() - 6
    v = h.view(-1, 8)[y.flatten() > 3]
    return (
        h[:, :count].square().sum()
        + h[1, count - 7 :].sin().sum()
        + h[:, 1:last].square().sum()
        + h[..., :last].exp().sum()
        + F.cross_entropy(m.head(v), y.flatten()[: v.shape[0]], reduction="sum")
    )


def attended(m, h, y):
    v, q = h[:, (y > 3).any(0)], h[:, :2].sin()
    one, mask = F.scaled_dot_product_attention, v[:, None, :, 0] > -9
    return (
        one(q, v, v).square().sum()
        + one(q, v, v, attn_mask=mask.expand(-1, 2, -1)).sin().sum()
        + one(q, v, v, attn_mask=mask.float() * v[:, None, :, 1]).sum()
        + one(v, v, v, is_causal=True).square().sum()
        + F.cross_entropy(m.head(v).mT, y[:, (y > 3).any(0)], reduction="sum")
    )


def other_dims(m, h, y):
    columns = y[0] > 3
    v = h[:, columns]
    return v.square().sum() + v.mean(1).sum() + h[1, columns].softmax(-1)[..., 0].sum()


def writes(m, h, y):
    mask, flat = y > 3, (y.flatten() > 3).nonzero().flatten()
    z, rows = h * 1, h.view(-1, 8)
    z[mask] = 0.5 * z[mask].sin()
    z[~mask] *= 2
    z[mask] += m.head.bias[:8]
    z[mask] = 1.5 * h[mask]
    added = torch.zeros_like(rows).index_add(0, flat, rows[flat], alpha=2)
    copied = rows.index_copy(0, flat, rows[flat].cos())
    ends, fixed = h[mask].sin(), h[mask].detach().exp()  # stages have the derivative of a copy
    ends[..., 0] = ends[:, 3:5] = -1.0
    fixed[..., -1] += 1.0
    fixed[:, 3:5] = h[mask].detach()[:, 1:3]
    to = torch.zeros(15, 8)
    to[14 - flat] = rows[flat].exp()
    table = torch.zeros(10, 8).index_add(0, y[mask], h[mask])
    table = table.index_put((y[mask],), h[mask] * 3, accumulate=True)
    table = table.scatter_add(0, y[mask][:, None].expand(-1, 8), h[mask])
    last = (added * copied).sum() + (ends * fixed).sum()
    return (z.square() + h).mean() + last + (to * table.sum()).mean()


def shapes(m, h, y):
    v = h[y > 3]
    return (
        v.view(-1, 2, 4).softmax(1).square().sum()
        + v.unsqueeze(1).expand(-1, 3, -1).sin().mean()
        + v.t().square().sum(0).mean()
        + v.flatten().exp().mean()
        + v.sum(1).view(-1, 1).mul(v).sin().sum()
        + v.flatten().unflatten(0, (-1, 8)).cos().sum()
        + torch.stack([v, v * 2], 1).reshape(-1, 8).square().mean()
        + torch.cat([v, v.tanh(), h[0]]).square().mean()
        + sum(part.square().sum() for part in v.chunk(2, 1))
        + (v[:, 0] * v[:, -1] + v[:, 2:4].sum(1)).sum()
        + v.permute(1, 0)[3].sum()
        + sum(v.unbind(1)).square().sum()
        + v.narrow(1, 1, 2).mean()
        + F.one_hot(y[y > 3], 10).mul(m.head(v)).sum()
    )


def products(m, h, y):
    v = h[y > 3]
    near = v @ v.T
    return (
        (v.T @ v).square().mean()
        + near.softmax(-1).square().sum()
        + near.diagonal().sum()
        + near.logsumexp(1).sum()
        + torch.einsum("nk,nl->kl", v, v.sin()).mean()
        + (v.cumsum(0) * v).sum()
        + v.softmax(0).square().sum()
        + F.layer_norm(v, (8,)).square().sum()
        + v[torch.arange(v.shape[0]), y[y > 3] - 3].sum()
        + m.head(F.embedding(torch.arange(v.shape[0]), m.first.weight.repeat(2, 1)) * v).sum()
    )


def batches(m, h, y):
    """Whole samples."""
    v = h[y[:, 2] > 3]
    attended = F.scaled_dot_product_attention(v, v, v)
    image = v.reshape(-1, 1, 5, 8)
    kernel = m.head.weight[:9, 0].view(1, 1, 3, 3)
    return (attended * (v @ v.mT).softmax(-1).matmul(v)).sum() + F.conv2d(image, kernel).sum()


def chosen_again(m, h, y):
    v, labels = h[y > 3], y[y > 3]
    v = v[labels > 4]
    return v.square().sum() + F.cross_entropy(m.head(v), labels[labels > 4])


def of_none_is_nothing(m, h, y):
    """What is not finite stays where it is not seen."""
    positive, large = h[h > 0.1], h[h > 9]
    rows = m.head((h[y > 3] - h[y > 3].detach() + 1).log())
    return positive.log().sum() + (m.gate.bias.sum() * large.log()).sum() + rows.sum()


def boxes(m, h, y):
    a, b = h[y > 3][:, :4].sigmoid(), h.flip(-1)[y > 3][:, :4].sigmoid()
    a, b = (torch.cat([v[:, :2], v[:, :2] + v[:, 2:]], 1) for v in (a, b))
    inner = (torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
    areas = [(v[:, 2] - v[:, 0]) * (v[:, 3] - v[:, 1]) for v in (a, b)]
    return (1 - inner / (areas[0] + areas[1] - inner)).sum() / (y > 3).sum().clamp(min=1)


# --- mixtures of experts --------------------------------------------------------------------------


def experts_by_places(m, h, y):
    rows = h.view(-1, 8)
    weights, chosen = m.gate(rows).softmax(-1).topk(2)
    out = torch.zeros_like(rows)
    for number, expert in enumerate(m.experts):
        row, place = torch.where(chosen == number)
        out[row] += weights[row, place, None] * expert(rows[row])
    return out.square().mean()


def experts_by_one_hot(m, h, y):
    """As Hugging Face's models have it."""
    rows = h.view(-1, 8)
    weights, chosen = m.gate(rows).softmax(-1).topk(2)
    out = torch.zeros_like(rows)
    mask = F.one_hot(chosen, 3).permute(2, 1, 0)
    for number, expert in enumerate(m.experts):
        place, row = torch.where(mask[number])
        if row.shape[0] == 0:
            continue
        current = rows[None, row].reshape(-1, 8)
        out.index_add_(0, row, (expert(current) * weights[row, place, None]).to(rows.dtype))
    return out.square().mean()


def experts_by_masks(m, h, y):
    rows = h.view(-1, 8)
    chosen = m.gate(rows).argmax(-1)
    out = torch.zeros_like(rows)
    for number, expert in enumerate(m.experts):
        mask = chosen == number
        if mask.any():
            out[mask] = expert(rows[mask])
    return out.square().mean() + h.mean()


def experts_by_counts(m, h, y):
    rows = h.view(-1, 8)
    chosen = m.gate(rows).argmax(-1)
    out = rows
    for number, expert in enumerate(m.experts):
        row = (chosen == number).nonzero().squeeze(-1)
        if len(row) == 0:
            continue
        out = out.index_copy(0, row, expert(rows[row]))
    return out.square().mean()


# --- where there are rows at all ------------------------------------------------------------------


def asked(m, h, y):
    mask, total = y > 3, h.mean()
    if mask.any():
        total = total + F.cross_entropy(m.head(h[mask]), y[mask])
    if mask.sum() > 0:
        total = total + h[mask].mean()
    if mask.sum().item() != 0:
        total = total + h[mask].square().mean() / h[mask].shape[0]
    if not mask.sum() == 0:
        total = total + h[mask].sum()
    v = h[mask]
    return total + F.mse_loss(v, v.detach() * 2) if len(v) else total


def classes_in_turn(m, h, y):
    total = h.sum() * 0
    for number in range(4, 10):
        v = h[y == number]
        if v.numel() > 0:
            total = total + (v - v.mean(0)).square().sum() / v.size(0)
    return total


FUNCTIONS = [labels_chosen_twice, experts_by_masks, expanded]
MORE = [
    *(
        places,
        writes,
        asked,
        first_rows,
        at_places,
        slices,
        attended,
        losses,
        sums,
        extremes,
        spreads,
        counts,
        other_dims,
        shapes,
        products,
        batches,
        chosen_again,
    ),
    *(of_none_is_nothing, boxes, experts_by_places, experts_by_one_hot, experts_by_counts),
    classes_in_turn,
]


def slow(values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def capture(function, labels=None):
    model = Model()

    def step(leaves):
        x, y = leaves
        value = function(model, model.first(x), y)
        if not value.dim():
            current_recorder().backward(value)
        return value

    leaves = TensorLeaf((3, 5, 8), torch.float32), TensorLeaf((3, 5), torch.int64)
    names = ModelState(model).canonical_names
    values = torch.randn(3, 5, 8), torch.tensor(LABELS["some"] if labels is None else labels)
    kinds = []

    def attempt(known: Known | None):
        kinds.append(known)
        return capture_step(ToCapture(step, model, leaves, names, known))

    return model, with_values_if_needed(attempt, lambda: values), kinds[-1]


def plain(function, model):
    return lambda x, y: function(model, model.first(x), y)


def captured(model, step):
    return lambda x, y: outputs_of(step, model, (x, y))[0]


def numbers(model, compute, given):
    """The value of a function and the gradients of a model; None for parameters without."""
    model.zero_grad()
    value = compute(*given)
    if value.requires_grad:
        value.backward()
    return [value.detach(), *(p.grad for p in model.parameters())]


def check_values_and_gradients(function):
    model, step, known = capture(function)
    assert known is None and not step.prints
    sizes = [node.meta["val"] for node in step.graph.nodes if node.op == "call_function"]
    assert not any(isinstance(value, torch.SymInt) for value in sizes)
    for kind, labels in LABELS.items():
        given = torch.randn(3, 5, 8), torch.tensor(labels)
        try:
            expected = numbers(model, plain(function, model), given)
        except (IndexError, RuntimeError):  # the largest of none
            assert kind == "none"
            continue
        found = numbers(model, captured(model, step), given)
        for mine, torchs in zip(found, expected, strict=True):
            zero = torch.zeros(()) if torchs is None else torchs
            mine = torch.zeros(()) if mine is None else mine
            mine, zero = torch.broadcast_tensors(mine, zero)
            torch.testing.assert_close(
                mine, zero, equal_nan=True, msg=f"{function.__name__}, {kind}"
            )


@pytest.mark.parametrize("function", [*FUNCTIONS, *slow(MORE)], ids=lambda f: f.__name__)
def test_values_and_gradients(function):
    check_values_and_gradients(function)


# --- inputs whose values are needed ---------------------------------------------------------------


def of_each_row_as_many(m, h, y):
    """As masked autoencoders do it; the masks are others in each microbatch."""
    mask = torch.zeros_like(y, dtype=torch.bool).scatter(1, y.argsort(1)[:, :2], True)
    kept = h[mask].view(3, 2, 8)
    row, place = (~mask).nonzero(as_tuple=True)
    rest = h[row, place].reshape(3, -1).square().sum(1)
    return kept.softmax(1)[:, 0].sum() + (rest * torch.arange(3.0)).mean()


def written_through_a_slice(m, h, y):
    """PyTorch's slices are views."""
    z = h * 1
    z[:, : (y[0] > 3).sum()].mul_(2)
    return z.square().sum()


def test_slices_that_are_written_to_need_values():
    model, step, known = capture(written_through_a_slice)
    assert known is not None
    given = torch.randn(3, 5, 8), torch.tensor(LABELS["some"])
    with torch.no_grad():
        expected = written_through_a_slice(model, model.first(given[0]), given[1])
        torch.testing.assert_close(captured(model, step)(*given), expected)


def how_many_there_were(m, h, y):
    total, count = h.sum() * 0, 0
    for number in (0, 3):
        if (y == number).any():
            total, count = total + h[y == number].mean(), count + 1
    return total / max(count, 1)


@pytest.mark.slow
@pytest.mark.parametrize("function", [of_each_row_as_many, how_many_there_were])
def test_as_few_values_as_will_do(function):
    model, step, known = capture(function)
    assert known is not None and known.decide_sizes == (function is of_each_row_as_many)
    is_same = 0
    for labels in LABELS.values():
        x, y = given = torch.randn(3, 5, 8), torch.tensor(labels)
        change = step.decisions.follow([x, y])[0]
        if change is not None:
            assert re_captured(function, labels, x, y) and function is how_many_there_were, change
            continue
        is_same += 1
        expected = numbers(model, plain(function, model), given)
        torch.testing.assert_close(numbers(model, captured(model, step), given), expected)
    assert is_same >= 2


def re_captured(function, labels, x, y):
    model, step, _ = capture(function, labels)
    expected = function(model, model.first(x), y)
    torch.testing.assert_close(outputs_of(step, model, (x, y))[0], expected)
    return True


def experts_counted(m, h, y):
    """The number of experts is not that of rows, and another one without rows."""
    rows, count, total = h.view(-1, 8), 0, h.sum() * 0
    for number, expert in enumerate(m.experts):
        mask = m.gate(rows).argmax(-1) == number
        if mask.any():
            total, count = total + expert(rows[mask]).mean(), count + 1
    return total / max(count, 1)


@pytest.mark.slow
def test_what_a_branch_decides_otherwise_is_looked_at():
    model, step, _ = capture(experts_counted)
    assert [check.check for check in step.prints] == [Check.ROWS] * 3
    assert all("if mask.any():" in check.label for check in step.prints)
    x, y = torch.randn(3, 5, 8), torch.tensor(LABELS["some"])
    with torch.no_grad():
        model.gate.weight.zero_(), model.gate.bias.zero_()  # rows choose by their first elements
        model.gate.weight[:, :3] = torch.eye(3)
        value, _, *passed = outputs_of(step, model, (x, y))
        assert all(passed)
        torch.testing.assert_close(value, experts_counted(model, model.first(x), y))
        model.gate.bias[1] = -math.inf
        assert [bool(p) for p in outputs_of(step, model, (x, y))[2:]] == [True, False, True]


@pytest.mark.parametrize(
    "is_any",
    [lambda rows: len(rows), lambda rows: rows.shape[0] / 15, lambda rows: rows.numel() > 0],
)
def test_the_truth_of_a_number_of_rows_is_looked_at(is_any):
    _, step, _ = capture(lambda m, h, y: h.sum() if is_any(h[h[..., 0] > 0]) else h.mean())
    assert [check.check for check in step.prints] == [Check.ROWS]


def of_a_mask_that_is_written_to(m, h, y):
    mask = h[..., 0] > 0
    rows = h[mask]
    mask &= h[..., 1] > 0
    return h.sum() if len(rows) else h.mean()


def test_a_mask_that_was_written_to_says_nothing_of_rows_that_it_chose():
    with pytest.raises(CaptureError, match="has written to that mask since it chose them"):
        capture(of_a_mask_that_is_written_to)


# --- what is refused ------------------------------------------------------------------------------


@torch.no_grad()
def of_chosen_places(h):
    return torch.where(h[h > 0] > 1)[0].sum()


REFUSED = {
    "is a result of the step": lambda m, h, y: h[h > 0],
    "is put in order": lambda m, h, y: h[h[..., 0] > 0].argmax() + h.sum(),
    "meets what another mask has as many rows of": lambda m, h, y: (h[h > 0] * h[h < 0]).sum(),
    "is looked through for places": lambda m, h, y: h.mean() * of_chosen_places(h),
    "is written at places": lambda m, h, y: h[h[:, 0, 0] > 0].index_fill(1, y[0], 1.0).sum(),
    "is divided": lambda m, h, y: h[h > 0][::2].sum(),
    "decides a size in a way": lambda m, h, y: torch.zeros(h[h > 0].shape[0] // 2).sum() + h.sum(),
    "is counted for an argument": lambda m, h, y: h.sum().add(h.sum(), alpha=len(h[h > 0])),
    "depends on values": lambda m, h, y: h.unique(dim=0).sum(),
}


@pytest.mark.parametrize("text", [*list(REFUSED)[:1], *slow(list(REFUSED)[1:])])
def test_refused(text):
    with pytest.raises(CaptureError, match=rf"aten::\w+ in .*{text}"):
        capture(REFUSED[text])


@pytest.mark.parametrize(
    "function",
    [
        lambda m, h, y: sum(p.sum() for p in h[h > 0].split(2)),
        lambda m, h, y: h.sum() if len(h[h > 0]) == 7 else h.mean(),
        *slow(
            [
                lambda m, h, y: sum(h[0, 0, 0] * i for i in range(h[h > 0].shape[0])),
                lambda m, h, y: h.sum() if h[h > 0].shape[0] > 4 else h.mean(),
                lambda m, h, y: h.sum() if (h > 0).sum() > 4 else h.mean(),
            ]
        ),
    ],
)
def test_a_number_of_rows_is_no_number_of_python(function):
    with pytest.raises(CaptureError, match=r"depends on a tensor's value in Python at .*chosen"):
        capture(function)


def expert_for_some(m, h, y):
    mask, out = y > 3, torch.zeros_like(h)
    if mask.any():
        out[mask] = m.experts[0](h[mask])
    return (out + h).square().mean()


def expert_for_all(m, h, y):
    mask, out = y > 3, m.experts[0](h)
    if mask.any():
        out[mask] = 2 * m.experts[0](h[mask])
    return out.square().mean()


@pytest.mark.parametrize("function", [expert_for_some, expert_for_all])
def test_parameters_that_only_a_branch_uses_are_named(function):
    with logged() as lines:
        capture(function)
    told = [line for line in lines if "in a whole call" in line]
    assert len(told) == (function is expert_for_some)
    assert all("uses experts.0.0.bias and 3 more only where a mask is true at" in t for t in told)
