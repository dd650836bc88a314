"""SparseAdam lets the moments of rows without a gradient stay; it takes sparse gradients only."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import MpxlaError
from mpxla.tests.backends import name_here
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

ON_JAX = {"MPXLA_DEVICE": "pjrt"}


class Pairs(nn.Module):
    """Vectors of pairs of words."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right = (nn.Embedding(9, 3, sparse=True) for _ in range(2))

    def forward(self, words):
        return (self.left(words[:, 0]) * self.right(words[:, 1])).sum(1)


def loss_of(model, words):
    return (model(words) - 1).square().mean()


@smp.step
def train_step(model, words):
    model.backward(loss_of(model, words))


def loop(optimizer, step):
    for number in range(4):
        optimizer.zero_grad()
        step(torch.randint(9, (4, 2), generator=torch.Generator().manual_seed(number)))
        optimizer.step()


def made(model):
    return torch.optim.SparseAdam(model.parameters(), 0.1, eps=1e-2)


def train(stages):
    smp.init({"pipeline_parallel_degree": stages, "microbatches": 2})
    model = smp.DistributedModel(Pairs())
    optimizer = smp.DistributedOptimizer(made(model))
    loop(optimizer, lambda words: train_step(model, words))
    return model.state_dict(), optimizer.state_dict()["state"]


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sparse_adam_trains_as_in_plain_torch(stages):
    model = Pairs()
    optimizer = made(model)
    loop(optimizer, lambda words: loss_of(model, words).backward())
    expected = model.state_dict(), optimizer.state_dict()["state"]
    for found in run_ranks(train, stages, stages, env=ON_JAX):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def refused():
    try:
        train(1)
    except MpxlaError as error:
        return str(error)


@pytest.mark.skipif(name_here() != "torch_xla", reason="the other backend has sparse tensors")
def test_torch_xla_has_no_sparse_tensors():
    (text,) = run_ranks(refused, 1)
    assert text.startswith("SparseAdam takes sparse gradients only") and "pjrt" in text
