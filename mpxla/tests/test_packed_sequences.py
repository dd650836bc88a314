"""Recurrent networks on packed sequences train as in PyTorch, with other lengths in every batch."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.graph.capture.torch_parts import torchs_recurrences
from mpxla.session import current
from mpxla.tests.graph.chosen.test_packed import FUNCTIONS, MORE, Model, captions, in_time
from mpxla.tests.ranks.run import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:LSTM with projections")]

LENGTHS = [[3, 6, 1, 4, 2, 2, 5, 1], [6] * 8, [1, 2, 3, 1, 4, 5, 2, 3]]


class Trained(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.model, self.function = Model(), function

    def forward(self, x, lengths, y):
        return self.function(self.model, x, lengths, y)


def batch(number):
    draw = torch.Generator().manual_seed(number)
    x, y = torch.randn(8, 6, 5, generator=draw), torch.randint(0, 9, (8, 6), generator=draw)
    return x, torch.tensor(LENGTHS[number]), y


def expected(function):
    module = Trained(function)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        parts = zip(*(t.chunk(2) for t in batch(number)), strict=True)
        with torchs_recurrences():
            loss = sum(module(*part) for part in parts) / 2
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, module.state_dict()


def train(num_stages, functions):
    smp.init({"microbatches": 2, "pipeline_parallel_degree": num_stages})

    @smp.step
    def step(model, x, lengths, y):
        loss = model(x, lengths, y)
        model.backward(loss)
        return loss

    found = []
    for function in functions:
        model = smp.DistributedModel(Trained(function))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        losses, compiled = [], []
        for number in range(3):
            optimizer.zero_grad()
            losses.append(float(step(model, *batch(number)).reduce_mean()))
            optimizer.step()
            compiled.append(current().backend.num_compilations)
        assert len(set(compiled)) == 1, compiled
        found.append((losses, {k: value.cpu() for k, value in model.state_dict().items()}))
    return found


ALL = [*FUNCTIONS, *MORE]
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("num_stages", "backend", "functions"),
    [
        (1, "pjrt", [in_time]),
        # Values and gradients of every function are tested in `graph/chosen/test_packed.py`.
        pytest.param(1, "torch_xla", ALL[::6], marks=slow),
        pytest.param(2, "pjrt", ALL[3::6], marks=slow),
        pytest.param(2, "torch_xla", [captions], marks=slow),
        pytest.param(1, "torch_xla", ALL, marks=[slow, pytest.mark.long]),
        pytest.param(2, "pjrt", ALL, marks=[slow, pytest.mark.long]),
    ],
)
def test_trains_as_plain_torch(num_stages, backend, functions):
    env = {"MPXLA_DEVICE": backend}
    for found in run_ranks(train, num_stages, num_stages, functions, env=env, timeout_s=600):
        for function, (losses, state) in zip(functions, found, strict=True):
            wanted, parameters = expected(function)
            name = function.__name__
            torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5, msg=name)
            torch.testing.assert_close(state, parameters, rtol=1e-4, atol=1e-5, msg=name)
