"""Hooks that a forward registers once, as transformers does to collect hidden states."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import close, host
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 3


class Hooked(nn.Module):
    """A hook changes what its first layer gives, so that it counts how often it was registered."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.is_hooked = False

    def forward(self, x):
        if not self.is_hooked:
            self.first.register_forward_hook(lambda module, args, result: 2 * result)
            self.is_hooked = True
        return self.last(torch.tanh(self.first(x)))


def plain_loss(model, x):
    return model(x).square().mean()


def after_inputs(model, x):
    """Is captured again with the values of its inputs, which Python needs."""
    loss = model(x).square().mean()
    return loss if (x > -100).all() else 2 * loss


def by_the_model(model, x):
    """Is captured for each question and way."""
    y = model(x)
    loss = y.square().mean()
    return loss if y.sum().item() > 0 else 3 * loss


def batch(number):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def train(loss_of):
    smp.init({"microbatches": 2})
    model = smp.DistributedModel(Hooked())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model, x):
        loss = loss_of(model, x)
        model.backward(loss)
        return loss

    losses = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(step(model, batch(number)).reduce_mean().item())
        optimizer.step()
    return losses, host(model.state_dict().items()), len(model.module.first._forward_hooks)


@pytest.mark.parametrize("loss_of", [plain_loss, after_inputs, by_the_model])
def test_are_there_once(loss_of):
    model = Hooked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(model, x) / 2 for x in batch(number).chunk(2))
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
    ((losses, state, num_hooks),) = run_ranks(train, 1, loss_of)
    assert num_hooks == 1
    assert losses == pytest.approx(expected, rel=1e-5)
    close(state, host(model.state_dict().items()))
