"""Loops over `param.grad` of a model's 16-bit parameters reach the gradients of their masters."""

import copy

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


def learn_from_a_copy(config):
    """Losses against a teacher that was copied off the layers after they were wrapped."""
    smp.init({"ddp": True, **config})
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    model = smp.DistributedModel(layers)
    teacher, inputs = copy.deepcopy(layers), torch.randn(4, 4)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.5))

    @smp.step
    def step(model, x):
        with torch.no_grad():
            wanted = teacher(x + 1)
        loss = (model(x) - wanted).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(step(model, inputs).reduce_mean().item())
        optimizer.step()
        for own, other in zip(teacher.parameters(), model.parameters(), strict=True):
            own.data.lerp_(other.detach(), 0.3)
    smp.shutdown()
    return losses


def test_copies_of_layers_with_divided_gradients_are_read_in_steps():
    whole = run_ranks(learn_from_a_copy, 2, {})
    divided = run_ranks(learn_from_a_copy, 2, {"shard_optimizer_state": True})
    assert divided[0] == pytest.approx(whole[0]) and whole[0][0] > whole[0][2] > 0
