"""Activations between a column layer and a row layer: what mixes columns is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mpxla.errors import CaptureError
from mpxla.tests.nn.in_threads import distributed, in_threads, lower, train_once

pytestmark = pytest.mark.unit
SAMPLES, POSITIONS, WIDTH, HEAD = 2, 3, 16, 4


class Block(nn.Module):
    _tp_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self, act):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down, self.act = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4), act

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def value():
    return torch.randn(SAMPLES, POSITIONS, 4, generator=torch.Generator().manual_seed(2))


def loss_of(model, x):
    return model(x).square().sum()


def lowered(act):
    ranks = distributed(lambda: Block(act), 2)
    return ranks, [lower(rank, loss_of, [value()]) for rank in ranks]


def heads(x):
    return x.view(*x.shape[:-1], -1, HEAD)


def halves(x):
    first, second = x.chunk(2, -1)
    return torch.cat([first * second.sigmoid(), second], -1)


def between_heads(x):
    return heads(x).softmax(-2).flatten(2)


REFUSED = {
    "aten::softmax": lambda x: x.softmax(-1),
    "aten::layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "aten::linalg_vector_norm": lambda x: functional.normalize(x, dim=-1),
    "aten::mean": lambda x: x - x.mean(),
    "aten::max": lambda x: x / x.abs().max(-1, keepdim=True).values,
    "aten::topk": lambda x: x * (x >= x.topk(3).values[..., -1:]),
    "aten::split": halves,
    "aten::slice": lambda x: torch.cat([x[..., :4].relu(), x[..., 4:]], -1),
    "aten::roll": lambda x: x + x.roll(1, -1),
    "aten::cumsum": lambda x: x.transpose(1, 2).cumsum(1).transpose(1, 2),
    "aten::select": lambda x: x * heads(x)[..., 0, :].repeat(1, 1, x.shape[-1] // HEAD),
    "aten::sum": lambda x: x * x.unsqueeze(2).sum(-1),
    "aten::softmax between heads": between_heads,
    "aten::scaled_dot_product_attention": lambda x: functional.scaled_dot_product_attention(
        x, x, x
    ),
    "aten::mul of all pairs": lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(2)[..., :8],
}


@pytest.mark.parametrize(
    "operator",
    [pytest.param(o, marks=[pytest.mark.slow] * (n % 3 > 0)) for n, o in enumerate(REFUSED)],
)
def test_what_mixes_columns_is_refused(operator):
    name = operator.partition(" ")[0]
    with pytest.raises(CaptureError, match=rf"^{name} in .* has a part, so that it would not see"):
        lowered(REFUSED[operator])


def with_slopes(x):
    each = heads(x).transpose(1, 2)
    slopes = torch.arange(each.shape[1], device=x.device)[:, None, None]
    attended = functional.scaled_dot_product_attention(each, each, each, slopes * x.new_ones(3))
    return attended.transpose(1, 2).flatten(2)


def with_weights_of_heads(x):
    weights = torch.linspace(-1, 1, heads(x).shape[2] * HEAD * HEAD).view(-1, HEAD, HEAD)
    return torch.einsum("bshd,hde->bshe", heads(x), weights).flatten(2)


EQUAL = {
    "aten::mul": lambda x: x * torch.arange(x.shape[-1]),
    "aten::scaled_dot_product_attention": with_slopes,
    "aten::einsum": with_weights_of_heads,
    "aten::where": lambda x: torch.where((torch.arange(x.shape[-1]) % 3 > 0)[None], x, 0.0),
    "aten::cat": lambda x: torch.cat([torch.linspace(0, 1, 8).expand(2, 1, -1), x], 1)[:, 1:],
}


@pytest.mark.parametrize("operator", EQUAL)
def test_positions_of_equal_values_are_refused(operator):
    text = rf"^{operator} in .* of which every rank of .* has a part together with those of a value"
    with pytest.raises(CaptureError, match=text):
        lowered(EQUAL[operator])


SUMS = {
    "aten::softmax": lambda x: (x @ x.transpose(-1, -2)).softmax(-1) @ x,
    "aten::sort": lambda x: (x @ x.transpose(-1, -2)).sort(dim=-1, stable=True).values @ x,
    "aten::logcumsumexp": lambda x: (x @ x.transpose(-1, -2)).logcumsumexp(-1) @ x,
    "aten::add": lambda x: x * (x @ torch.ones(x.shape[-1], 1) + 1),
    "aten::mul": lambda x: x * (x @ torch.ones(x.shape[-1], 1)),
    "aten::linear": lambda x: x * functional.linear(x, x.new_ones(1, 8).detach(), torch.ones(1)),
}


@pytest.mark.parametrize("operator", SUMS)
def test_parts_of_sums_are_refused(operator):
    with pytest.raises(CaptureError, match=rf"^{operator} in .* works on a sum over positions of"):
        lowered(SUMS[operator])


def of_einsum(x):
    scores = torch.einsum("bshd,bthd->bhst", heads(x), heads(x)).softmax(-1)
    return torch.einsum("bhst,bthd -> bshd", scores, heads(x)).flatten(2)


def attention(x):
    each = heads(x).transpose(1, 2)
    scores = (each @ each.transpose(-1, -2)).softmax(-1)
    return (scores @ each).permute(0, 2, 1, 3).reshape(x.shape)


FINE = {
    "elements": lambda x: functional.gelu(x) * 2 + x.clamp(min=0),
    "attention": attention,
    "norm of heads": lambda x: functional.layer_norm(heads(x), (HEAD,)).flatten(2),
    "half of heads": lambda x: torch.cat(heads(x).chunk(2, -1)[::-1], -1).flatten(2),
    "positions": lambda x: x.softmax(1) + x.mean((0, 1), keepdim=True) + x[:, :1] + x.flip(1),
    "of all": lambda x: x[..., :],
    "rows": lambda x: x.view(-1, x.shape[-1]).softmax(0).view(x.shape),
    "repeated": lambda x: heads(x).unsqueeze(3).expand(-1, -1, -1, 2, -1).mean(3).flatten(2),
    "of einsum": of_einsum,
    "equal": lambda x: x * torch.ones(x.shape[-1]) + torch.arange(3)[:, None],
    "reduced": lambda x: x.unsqueeze(-1).mul(torch.ones(3)).softmax(-1).sum(-1) * x,
}


QUICK = ("attention", "norm of heads", "rows", "of all", "elements")


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(act, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name, act in FINE.items()
    ],
)
def test_what_computes_by_columns_or_heads_is_right(act):
    ranks, programs = lowered(act)
    (loss, gradients), (_, other) = in_threads(train_once, ranks, programs, [[value()]] * 2)
    whole = Block(act)
    expected = loss_of(whole, value())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    weight = ranks[0].shards["up.weight"].join([gradients["up.weight"], other["up.weight"]])
    torch.testing.assert_close(weight, whole.up.weight.grad)
