"""Training in float64, as scripts do that call `torch.set_default_dtype(torch.float64)`."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

MICROBATCHES = 3  # a third has other digits in float32
STEPS = 3


def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 4, generator=generator), torch.arange(6) % 3


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y)


@smp.step
def train_step(model, x, y):
    loss = loss_of(model, x, y)
    model.backward(loss)
    return loss


def loop(model, optimizer, step):
    """Losses, norms and the last gradients; `step(number)` leaves gradients and gives a loss."""
    losses, norms = [], []
    for number in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(number))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return losses, norms, model.state_dict()


def train(config):
    torch.set_default_dtype(torch.float64)
    try:
        smp.init({"ddp": True, "microbatches": MICROBATCHES, **config})
        model = smp.DistributedModel(build())
        optimizer = smp.DistributedOptimizer(optim.AdamW(model.parameters(), 0.02))

        def step(number):
            x, y = (t.chunk(smp.rdp_size())[smp.rdp_rank()] for t in batch(number))
            loss = train_step(model, x, y).reduce_mean().item()
            return sum(smp.allgather(loss, smp.RDP_GROUP)) / smp.rdp_size()

        return loop(model, optimizer, step)
    finally:
        torch.set_default_dtype(torch.float32)


def train_plainly():
    torch.set_default_dtype(torch.float64)
    try:
        model = build()

        def step(number):
            loss = loss_of(model, *batch(number))
            loss.backward()
            return loss.item()

        return loop(model, optim.AdamW(model.parameters(), 0.02), step)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("size", "config"),
    [
        (2, {"pipeline_parallel_degree": 2}),
        pytest.param(2, {"shard_optimizer_state": True}, marks=pytest.mark.slow),
        pytest.param(3, {"microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_as_plain_torch(size, config):
    losses, norms, state = train_plainly()
    for found_losses, found_norms, found in run_ranks(train, size, config):
        assert found_losses == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(found_norms, norms, rtol=1e-12, atol=0)
        for name, value in state.items():
            torch.testing.assert_close(found[name].cpu(), value, rtol=1e-11, atol=1e-13)
