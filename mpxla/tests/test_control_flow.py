"""`torch.cond`, `while_loop`, `scan` and `map` in a step: as the Python that they stand for.

Plain PyTorch runs that Python here. (Torch's own gradients of `while_loop` and `scan` outside of
torch.compile are others, 2.9 to 2.13, where the body reads parameters by a closure.)
"""

import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as mapped
from torch._higher_order_ops import scan, while_loop

import mpxla as smp
from mpxla.tests.clients import close, host
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS, MICROBATCHES = 3, 2


class Net(nn.Module):
    def __init__(self, is_plain):
        super().__init__()
        self.is_plain = is_plain
        self.first, self.turn, self.other, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        h = self.first(x)
        if self.is_plain:
            h = self.turn(h) if h.sum() > 0 else self.other(h).sin()
            while h.abs().max() > 0.5:
                h = 0.7 * self.turn(h).tanh()
            carried, kept = h, []
            for row in (x, x + 1, x - 1):
                carried, one = torch.tanh(carried + self.other(row)), carried * row
                kept.append(one)
            return torch.stack([self.last(row) * self.last.bias for row in carried + sum(kept)])
        h = torch.cond(h.sum() > 0, self.turn, lambda h: self.other(h).sin(), (h,))
        (h,) = while_loop(
            lambda h: h.abs().max() > 0.5, lambda h: (0.7 * self.turn(h).tanh(),), (h,)
        )
        carried, kept = scan(
            lambda carried, row: (torch.tanh(carried + self.other(row)), carried * row),
            h,
            torch.stack([x, x + 1, x - 1]),
        )
        rows = carried + kept.sum(0)
        return mapped(lambda row, bias: {"row": self.last(row) * bias}, rows, self.last.bias)["row"]


def built(is_plain):
    torch.manual_seed(0)
    return Net(is_plain)


def batch(number):
    return 2 * torch.randn(3 * MICROBATCHES, 4, generator=torch.Generator().manual_seed(number))


def train_plainly():
    model, losses = built(True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        for x in batch(number).split(3):
            losses.append((model(x) - 0.5).square().mean())
            (losses[-1] / MICROBATCHES).backward()
        optimizer.step()
    return torch.stack(losses).detach(), host(model.state_dict().items())


def train(stages):
    smp.init({"microbatches": MICROBATCHES, "pipeline_parallel_degree": stages})
    model = smp.DistributedModel(built(False))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))

    @smp.step
    def train_step(model, x):
        loss = (model(x) - 0.5).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        losses += train_step(model, batch(number)).outputs
        optimizer.step()
    return torch.stack([loss.cpu() for loss in losses]), host(model.state_dict().items())


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_operators_of_control_flow(stages):
    expected = train_plainly()
    for found in run_ranks(train, stages, stages):
        close(found[0], expected[0])
        close(found[1], expected[1])
