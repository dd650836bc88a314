"""Optimizers that wrap others, with state dicts of a form of their own."""

import copy

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.errors import CheckpointError
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


class Slow(torch.optim.Optimizer):
    """Moves every second step half of the way back to slow weights, as Lookahead does."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["slow"] = p.detach().clone()

    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        for p, state in self.state.items() if self.count % 2 == 0 else ():
            state["slow"] = state["slow"].lerp(p.detach(), 0.5)
            p.data.copy_(state["slow"])

    def state_dict(self):
        return {"slow": super().state_dict(), "inner": self.inner.state_dict(), "n": self.count}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["slow"])
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.count = self.inner.param_groups, state_dict["n"]


class Delegating(Slow):
    """Keeps everything in the optimizer that it wraps."""

    def state_dict(self):
        return {**self.inner.state_dict(), "n": self.count}

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.count = self.inner.param_groups, state_dict["n"]


def made(kind, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, lambda model: kind(torch.optim.AdamW(model.parameters(), lr=0.1))


def batch(step):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def expected(kind):
    model, optimizer_of = made(kind, 0)
    optimizer = optimizer_of(model)
    for step in range(5):
        if step == 3 and kind is Delegating:  # its slow weights begin anew
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = optimizer_of(model)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def train(kind, folder, by_file, config=None):
    smp.init(config or {})

    @smp.step
    def train_step(model, x):
        model.backward(model(x).square().mean())

    module, optimizer_of = made(kind, 0)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    for step in range(5):
        if step == 3 and by_file:
            smp.save_checkpoint(folder, "t", model=model, optimizer=optimizer)
            model = smp.DistributedModel(made(kind, 1)[0])
            optimizer = smp.DistributedOptimizer(optimizer_of(model))
            smp.resume_from_checkpoint(folder, "t", model=model)
            train_step(model, batch(step))  # which places the model
        elif step == 3:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = smp.DistributedOptimizer(optimizer_of(model))
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        train_step(model, batch(step))
        optimizer.step()
    return model.state_dict()


def train_all(folder, kinds):
    found = []
    for kind, by_file in kinds:
        found.append(train(kind, folder / kind.__name__, by_file))
        smp.shutdown()
    return found


def test_their_state_comes_back(tmp_path):
    kinds = [(Slow, False), (Slow, True), (Delegating, False)]
    (found,) = run_ranks(train_all, 1, tmp_path, kinds)
    for (kind, _), state in zip(kinds, found, strict=True):
        torch.testing.assert_close(dict(state), dict(expected(kind)), rtol=1e-4, atol=1e-5)


def refused(folder):
    with pytest.raises(CheckpointError) as error:
        train(Slow, folder, False, {"pipeline_parallel_degree": 2})
    return str(error.value)


@pytest.mark.slow
def test_several_stages_are_refused(tmp_path):
    for text in run_ranks(refused, 2, tmp_path):
        assert "the state dict of Slow has 'slow' beside 'state' and 'param_groups'" in text
        assert "Save optimizer.orig_state_dict() on every rank" in text
