"""Sums over many values of 16 bits are added up in float32: as near to exact ones as PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

ROWS, LENGTH = 6, 3000


def targets():
    return torch.arange(LENGTH) % ROWS


SUMS = {
    "of logarithms": lambda x: (x / 2).log().float().mean(),
    "of powers": lambda x: (x / 2).exp().float().sum(),
    "of logarithms in rows": lambda x: (x / 2).log().float().sum(-1),
    "cross entropy of probabilities": lambda x: F.binary_cross_entropy(x / 2, x * 0 + 1),
    "all": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "rows": lambda x: x.mean(-1),
    "columns": lambda x: x.t().sum(0, keepdim=True),
    "in another type": lambda x: x.sum(-1, dtype=torch.float32),
    "several": lambda x: (x[:, None] * x[None]).sum((0, 2)),
    "norm": lambda x: x.norm(),
    "deviation": lambda x: x.std(),
    "cumulative": lambda x: x.cumsum(-1),
    "softmax": lambda x: (x * 9).softmax(-1),
    "pool": lambda x: F.avg_pool1d(x[None], 1000),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x.view(1, ROWS, 50, 60), 2),
    "squares": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x), delta=0.3),
    "cross entropy of scores": lambda x: F.binary_cross_entropy_with_logits(x, x.detach() * 0),
    "weighted classes": lambda x: F.nll_loss(x.t(), targets(), weight=x[:, 0].detach()),
    "convolution": lambda x: F.conv1d(x[None], x[None, :, :1000]),
    "index_add": lambda x: x.new_zeros(ROWS).index_add(0, targets(), x[0]),
    "scatter_add": lambda x: x.new_zeros(ROWS).scatter_add(0, targets(), x[0]),
    "scatter_reduce": lambda x: x.new_zeros(4).scatter_reduce(0, targets() % 4, x[0], "mean"),
    "put": lambda x: x.new_zeros(ROWS).index_put((targets(),), x[0], accumulate=True),
    "gradients of rows": lambda x: F.embedding(targets(), x[:, :9].contiguous()),
}


class Sums(nn.Module):
    """Every sum is over a parameter of its own."""

    def __init__(self, dtype):
        super().__init__()
        values = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(0)) + 0.1
        values = values.bfloat16()  # the same in all types
        self.terms = nn.ParameterList(nn.Parameter(values.to(dtype)) for _ in SUMS)

    def forward(self):
        return [one(term) for one, term in zip(SUMS.values(), self.terms, strict=True)]


def loss_of(results):
    """All elements of a result count differently."""
    weights = [1 + torch.arange(r.numel()).reshape(r.shape) % 3 for r in results]
    return sum((r.double() * w).sum() for r, w in zip(results, weights, strict=True))


def results_of(dtype):
    """By name: the result and its gradient, in PyTorch."""
    model = Sums(dtype)
    results = model()
    loss_of(results).backward()
    return found_by(results, model)


def found_by(results, model):
    gradients = [p.grad.double() for p in model.parameters()]
    values = [r.detach().cpu().double() for r in results]
    return dict(zip(SUMS, zip(values, gradients, strict=True), strict=True))


def add_up(dtype):
    """Runs on the rank."""
    smp.init()
    model = smp.DistributedModel(Sums(dtype))

    @smp.step
    def step(model, batch):
        results = model()
        model.backward(loss_of(results))
        return results

    return found_by([r.outputs[0] for r in step(model, torch.zeros(1))], model)


def distance(one, other):
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("backend", ["pjrt", "torch_xla"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_sums(dtype, backend):
    (found,) = run_ranks(add_up, 1, dtype, env={"MPXLA_DEVICE": backend})
    exact, rounded = results_of(torch.float64), results_of(dtype)
    wrong = []
    for name, pair in found.items():
        for part, of_torch, truth in zip(pair, rounded[name], exact[name], strict=True):
            most = 3 * distance(of_torch, truth) + torch.finfo(dtype).eps / 2
            # Some of PyTorch's own kernels for the processor add up in 16 bits.
            if not distance(part, truth) <= min(most, 0.03):
                wrong.append((name, distance(part, truth), most))
    assert not wrong
