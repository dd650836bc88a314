"""Operators that users define, which may do on the host what a captured step cannot."""

import numpy as np
import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.clients import close, host
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

MICROBATCHES, NUM_STEPS = 2, 3
seen = []


@torch.library.custom_op("mpxla_test::scaled_cube", mutates_args=())
def scaled_cube(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.from_numpy(np.power(x.detach().cpu().numpy(), 3) * np.float32(factor))


@scaled_cube.register_fake
def shape_of_cube(x, factor):
    return torch.empty_like(x)


def save_argument(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def derivative(ctx, gradient):
    (x,) = ctx.saved_tensors
    return gradient * 3 * x * x * ctx.factor, None


scaled_cube.register_autograd(derivative, setup_context=save_argument)


@torch.library.custom_op("mpxla_test::best_pairs", mutates_args=())
def best_pairs(cost: torch.Tensor) -> torch.Tensor:
    """For each row in turn, the cheapest column that is free: int64 [rows]."""
    values, taken = cost.detach().cpu().numpy(), []
    for row in values:
        order = [int(column) for column in np.argsort(row) if int(column) not in taken]
        taken.append(order[0])
    return torch.tensor(taken)


@best_pairs.register_fake
def shape_of_pairs(cost):
    return cost.new_empty(cost.shape[0], dtype=torch.int64)


@torch.library.custom_op("mpxla_test::note", mutates_args=())
def note(loss: torch.Tensor) -> torch.Tensor:
    seen.append(float(loss))
    return loss.clone()


note.register_fake(torch.empty_like)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.second(scaled_cube(torch.tanh(self.first(x)), 0.5))))


def loss_of(model, x, wanted):
    found = model(x)
    pairs = best_pairs(torch.cdist(found, wanted))
    loss = (found - wanted[pairs]).square().mean()
    return loss + 0 * note(loss.detach())


def train_step(model, x, wanted):
    loss = loss_of(model, x, wanted)
    model.backward(loss)
    return loss


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 6, generator=generator), torch.randn(6, 4, generator=generator)


def raw_model():
    torch.manual_seed(0)
    return Net()


def train(keys):
    smp.init({"microbatches": MICROBATCHES, **keys})
    model = smp.DistributedModel(raw_model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step, losses = smp.step(train_step), []
    seen.clear()
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        losses += [loss.item() for loss in step(model, *batch(number)).outputs]
        optimizer.step()
    state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    return losses, state, list(seen)


@pytest.mark.parametrize("stages", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_operators_of_the_user_run_on_the_host(stages):
    model = raw_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        for one in zip(*(value.split(3) for value in batch(number)), strict=True):
            loss = loss_of(model, *one)
            (loss / MICROBATCHES).backward()
            expected.append(loss.item())
        optimizer.step()
    results = run_ranks(train, stages, {"pipeline_parallel_degree": stages})
    for losses, state, _ in results:
        assert losses == pytest.approx(expected, abs=1e-5)
        close(state, host(model.state_dict().items()))
    noted = results[-1][2]  # on the rank that has the loss, in every microbatch
    assert sorted(noted) == pytest.approx(sorted(expected), abs=1e-5)
    assert all(not others for *_, others in results[:-1])
