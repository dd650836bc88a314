"""Whole jobs on the PJRT backend: two stages train as plain PyTorch does, without torch_xla."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks_unpooled

pytestmark = pytest.mark.ranks

PJRT = {"MPXLA_DEVICE": "pjrt"}


def make_model():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16)
    first = nn.Linear(8, 16, bias=False)  # its gradient would be rounding before a norm
    return nn.Sequential(first, norm, nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4))


def batches():
    torch.manual_seed(1)
    return [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(3)]


def train(config):
    """Losses, parameters, gradients and buffers after three steps of AdamW."""
    smp.init(config)
    model = smp.DistributedModel(make_model())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @smp.step
    def step(model, x, y):
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss, model.module[4].weight

    losses, weights = [], []
    for x, y in batches():
        optimizer.zero_grad()
        weights.append(model.state_dict()["4.weight"])
        loss, weight = step(model, x, y)
        optimizer.step()  # takes the memory of the parameters, but not of results
        assert torch.equal(weight.outputs[0], weights[-1])
        losses.append(loss.reduce_mean().item())
    kinds = {(type(p), p.device.type) for p in model.local_parameters()}
    gradients = {n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None}
    was_there = "torch_xla" in sys.modules
    return losses, model.state_dict(), gradients, kinds, was_there


def expected(num_microbatches):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        parts = zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True)
        loss = torch.stack([F.cross_entropy(model(a), b) for a, b in parts]).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, model


def test_two_stages_like_pytorch_without_torch_xla():
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}
    ranks = [result.value for result in run_ranks_unpooled(train, 2, config, env=PJRT)]
    losses, model = expected(2)
    state = model.state_dict()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    seen = set()
    for got, parameters, gradients, kinds, was_there in ranks:
        torch.testing.assert_close(got, losses)
        torch.testing.assert_close(dict(parameters), dict(state))
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)
        seen.update(gradients)
        assert kinds == {(nn.Parameter, "cpu")}, "users see ordinary tensors"
        assert not was_there
    assert seen == set(wanted)
