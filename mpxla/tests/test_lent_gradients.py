"""Loops over `param.grad` of a model's 16-bit parameters reach the gradients of their masters."""

import pytest
import torch

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.wrong_uses import REPLICAS, TWO, Net, batch

pytestmark = pytest.mark.ranks


def train(config, halves):
    """Weights after some steps, with halved gradients or half the learning rate, and norms."""
    smp.init({**config, "bf16": True})
    torch.manual_seed(0)
    model = smp.DistributedModel(Net())
    rate = 0.5 if halves else 0.25
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), rate, momentum=0.5))

    @smp.step
    def step(model, x):
        model.backward((model(x) - 1).square().mean())

    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        step(model, batch())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(torch.stack([g.norm() for g in grads]).norm().item())
        for p in model.parameters() if halves else ():
            if p.grad is not None:
                p.grad = p.grad * 0.5 if p.dim() == 1 else p.grad.mul_(0.5)
        optimizer.step()
    found = model.state_dict(), norms, {g.dtype for g in grads}
    smp.shutdown()
    return found


@pytest.mark.parametrize(
    ("size", "config"),
    [(1, {}), *(pytest.param(2, c, marks=pytest.mark.slow) for c in (TWO, REPLICAS))],
)
def test_loops_over_gradients_of_parameters(size, config):
    halved = run_ranks(train, size, config, True)
    for found, expected in zip(halved, run_ranks(train, size, config, False), strict=True):
        assert all(torch.equal(value, expected[0][name]) for name, value in found[0].items())
        assert found[1] == expected[1] and min(found[1]) > 0 and found[2] == {torch.float32}
