"""Scripted and traced modules inside a model train as in plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.parallel.scripted import without_scripts
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.turns = 2
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("factor", torch.ones(6) * 2)

    def forward(self, x):
        for _ in range(self.turns):
            x = torch.tanh(self.inner(x)) * self.factor
        return self.norm(x) if x.dim() > 1 else x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.enter, self.block, self.leave = nn.Linear(4, 6), Block(), nn.Linear(6, 3)
        self.traced = nn.Sequential(nn.Linear(6, 6), nn.GELU())

    def forward(self, x):
        return self.leave(self.traced(self.block(self.enter(x))))


def model_with_scripts():
    model = Model()
    model.block = torch.jit.script(model.block)
    model.traced = torch.jit.trace(model.traced, torch.randn(2, 6))
    for _ in range(3):  # torch optimizes what has run
        model.eval()(torch.randn(4, 4)).sum().backward()
    model.zero_grad(set_to_none=True)
    return model.train()


@pytest.mark.unit
def test_plain_modules_take_their_places():
    model = model_with_scripts()
    before = {name: id(p) for name, p in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    script = model.block
    x = torch.randn(5, 4)
    expected = model.eval()(x)
    made = without_scripts(model)
    assert made is model and not isinstance(model.block, torch.jit.ScriptModule)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    torch.testing.assert_close(dict(model.state_dict()), state)
    torch.testing.assert_close(model(x), expected)
    model.train()
    assert not torch.equal(model(x), expected), "batch norm sees that it trains"
    assert script.inner.weight.numel() == 0, "there is one holder of each tensor"
    whole = without_scripts(torch.jit.script(Model()))
    torch.testing.assert_close(whole.eval()(x), Model().eval()(x))


def train(num_stages):
    smp.init({"microbatches": 2, "pipeline_parallel_degree": num_stages})
    raw = model_with_scripts()
    chosen = torch.optim.SGD(raw.parameters(), lr=0.1)
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(chosen)

    @smp.step
    def step(model, x, y):
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        losses.append(float(step(model, x, y).reduce_mean()))
        optimizer.step()
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def batches():
    draw = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, 4, generator=draw), torch.randint(0, 3, (8,), generator=draw))
        for _ in range(3)
    ]


def trained_plainly():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        parts = zip(x.chunk(2), y.chunk(2), strict=True)
        loss = sum(F.cross_entropy(model(part), labels) for part, labels in parts) / 2
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, dict(model.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_trains_as_plain_torch(num_stages):
    losses, state = trained_plainly()
    for found, held in run_ranks(train, num_stages, num_stages):
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(held, state, rtol=1e-4, atol=1e-5)
