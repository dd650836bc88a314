"""What scripts do between step calls, where gradients or values are on several ranks.

Each test does it with a plain model as well, and compares.
"""

import copy

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

BY_HAND = {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}


class Scaled(nn.Module):
    """Two layers, one of them on another stage, which multiply by the same number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.scale = self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.second(self.first(x) * self.scale)


class Last(nn.Linear):
    """Multiplies what it gets."""

    def forward(self, x):
        return super().forward(x) * self.scale


def built():
    torch.manual_seed(0)
    net = Scaled().double()
    net.second.__class__ = Last
    return net


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def batch(number, count=8):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64)


def differences(model, plain):
    """Of all gradients that this rank has."""
    own = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    found = {n: g.cpu() - plain.get_parameter(n).grad for n, g in own.items() if g is not None}
    return {name: value.abs().max().item() for name, value in found.items()}


def accumulate(keys):
    """Runs on every rank: three reductions of two step calls each, and no zero_grad between."""
    smp.init({**BY_HAND, "microbatches": 2, "ddp": True, **keys})
    net = built()
    plain = copy.deepcopy(net)
    smp.set_partition(net.second, 1)
    model, found = smp.DistributedModel(net, backward_passes_per_step=2), []
    for number in range(6):
        x = batch(number)
        train_step(model, x.chunk(2)[smp.rdp_rank()])
        plain(x).square().mean().backward()
        if number % 2:
            found.append(differences(model, plain))
    return found


@pytest.mark.parametrize(
    "keys", [{}, {"shard_gradients": True, "sdp_param_persistence_threshold": 0}]
)
def test_tied_parameters_keep_what_earlier_reductions_gave(keys):
    for found in run_ranks(accumulate, 4, keys):
        for differs in found:
            assert "scale" in differs
            assert max(differs.values()) < 1e-12, differs


class Branches(nn.Module):
    """A step goes through one of two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, is_first):
        return self.last(self.first(x) if is_first else self.second(x))


def branch(keys):
    """Runs on every rank: a layer has a gradient, and one replica does not train it any more."""
    smp.init({"microbatches": 1, "ddp": True, **keys})
    torch.manual_seed(0)
    net = Branches().double()
    plain = copy.deepcopy(net)
    model, found = smp.DistributedModel(net, backward_passes_per_step=2), []

    @smp.step
    def step(model, x, is_first):
        model.backward(model(x, is_first).square().mean())

    ways = [(True, True), (True, False), (False, False), (True, False)]
    for number, way in enumerate(way for way in ways for _ in range(2)):
        parts = batch(number).chunk(2)
        step(model, parts[smp.rdp_rank()], way[smp.rdp_rank()])
        for x, is_first in zip(parts, way, strict=True):
            (plain(x, is_first).square().mean() / 2).backward()
        if number % 2:
            found.append(differences(model, plain))
    return found


@pytest.mark.parametrize("keys", [{}, {"shard_optimizer_state": True}])
def test_layers_that_one_replica_does_not_train_keep_what_earlier_reductions_gave(keys):
    for found in run_ranks(branch, 2, keys):
        assert len(found[-1]) == 6
        for differs in found:
            assert max(differs.values()) < 1e-12, differs


def clip_values():
    """Runs on every rank: gradients that are clipped are on one of them only."""
    smp.init(BY_HAND)
    net = built()
    net.second.requires_grad_(False)
    net.scale.requires_grad_(False)
    plain = copy.deepcopy(net)
    smp.set_partition(net.second, 1)
    model = smp.DistributedModel(net)
    train_step(model, batch(0))
    plain(batch(0)).square().mean().backward()
    for parameters in (model.parameters(), plain.parameters()):
        nn.utils.clip_grad_value_(parameters, 0.01)
    return differences(model, plain)


def test_a_rank_without_gradients_clips_values():
    first, second = run_ranks(clip_values, 2)
    assert set(first) == {"first.weight", "first.bias"}
    assert max(first.values()) < 1e-12
    assert second == {}


def made(state=None):
    """A model and its optimizer on every rank, and a plain pair."""
    net = built()
    plain = copy.deepcopy(net)
    smp.set_partition(net.second, 1)
    model = smp.DistributedModel(net)
    own = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    if state is not None:
        model.load_state_dict(state[0])
        plain.load_state_dict(state[0])
        own.load_state_dict(state[1])
        other.load_state_dict(state[1])
    return model, own, plain, other


def step(model, own, plain, other):
    own.zero_grad()
    other.zero_grad()
    train_step(model, batch(0))
    plain(batch(0)).square().mean().backward()
    own.step()
    other.step()


def resume():
    """Runs on every rank: after a resume, settings change before the first step."""
    smp.init(BY_HAND)
    model, own, plain, other = made()
    step(model, own, plain, other)
    model, own, plain, other = made((model.state_dict(), own.state_dict()))
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (own, other)]
    for optimizer, scheduler in zip((own, other), schedulers, strict=True):
        optimizer.param_groups[0]["lr"] = 0.04
        optimizer.param_groups[0]["weight_decay"] = 0.3
        scheduler.step()
    step(model, own, plain, other)
    state = model.state_dict()
    differs = {n: (state[n] - v).abs().max().item() for n, v in plain.state_dict().items()}
    return own.param_groups[0]["lr"], other.param_groups[0]["lr"], differs


def resume_with_more():
    """Runs on every rank: after a resume, another group comes before the first step."""
    smp.init(BY_HAND)
    net = built()
    plain = copy.deepcopy(net)
    smp.set_partition(net.second, 1)
    model = smp.DistributedModel(net)
    pairs = []
    for one in (model, plain):
        groups = [p for n, p in one.named_parameters() if "second" in n], one.get_parameter
        name = "module.first.weight" if one is model else "first.weight"
        optimizer = torch.optim.SGD(groups[0], lr=0.1, momentum=0.9)
        optimizer = smp.DistributedOptimizer(optimizer) if one is model else optimizer
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.2
        optimizer.load_state_dict(state)
        optimizer.add_param_group({"params": [groups[1](name)], "lr": 0.3, "momentum": 0.5})
        pairs.append(optimizer)
    for _ in range(2):
        step(model, pairs[0], plain, pairs[1])
    state, rates = model.state_dict(), [group["lr"] for group in pairs[0].param_groups]
    return rates, {n: (state[n] - v).abs().max().item() for n, v in plain.state_dict().items()}


def test_groups_that_come_between_resume_and_first_step_stay():
    for rates, differs in run_ranks(resume_with_more, 2):
        assert rates == [0.2, 0.3]
        assert max(differs.values()) < 1e-12, differs


def test_settings_that_change_between_resume_and_first_step_stay():
    for own, plain, differs in run_ranks(resume, 2):
        assert own == plain == 0.02
        assert max(differs.values()) < 1e-12, differs
