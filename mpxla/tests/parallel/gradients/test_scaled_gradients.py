"""With `fp16: True`, gradients have the loss scale in them, or not any more: nobody may notice."""

import logging

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.log import get_logger
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks
SCALE, LIMIT, STEPS = 128.0, 0.5, 6


def made():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(number):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


def loss_of(model, x):
    return (model(x) - 1).square().mean() * 3


def loop(model, optimizer, backward):
    """Clips some updates by norm and some by value, adds to gradients that were used or clipped."""
    norms = []
    for number in range(STEPS):
        if number != 2:
            optimizer.zero_grad()
        backward(batch(number))
        if number % 2:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        if number == 3:
            backward(batch(number + 100))
        if number == 4:
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        if number == 5:
            optimizer.step()
    return norms


def train(config):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    get_logger().addHandler(handler)
    smp.init({"ddp": True, "fp16": True, **config})
    model = smp.DistributedModel(made())
    inner = torch.optim.SGD(model.parameters(), 0.3, momentum=0.5)
    optimizer = smp.DistributedOptimizer(inner, static_loss_scale=SCALE)

    @smp.step
    def step(model, x):
        model.backward(loss_of(model, x))

    norms = loop(model, optimizer, lambda x: step(model, x.chunk(smp.rdp_size())[smp.rdp_rank()]))
    get_logger().removeHandler(handler)
    assert all(p.grad is None for p in model.parameters())
    told = [line for line in lines if "param.grad of the model's own is None" in line]
    return norms, model.state_dict(), told


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"shard_optimizer_state": True}, marks=pytest.mark.slow),
        {"pipeline_parallel_degree": 2},
    ],
)
def test_clipping_and_adding_see_no_loss_scale(config):
    plain = made()

    def half(x):
        values = {name: p.half() for name, p in plain.named_parameters()}
        return torch.func.functional_call(plain, values, (x.half(),)).float()

    optimizer = torch.optim.SGD(plain.parameters(), 0.3, momentum=0.5)
    expected = loop(plain, optimizer, lambda x: loss_of(half, x).backward())
    ranks = run_ranks(train, 2, config)
    assert [len(told) for _, _, told in ranks] == [1, 0]
    for norms, state, _ in ranks:
        assert norms == pytest.approx(expected, rel=0.01)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name].float(), value, rtol=0.01, atol=2e-3)
