"""Optimizers that keep copies of parameters, or lists of them, train as in one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from mpxla.errors import MpxlaError
from mpxla.parallel.updates.companions import Heir, follow_parameters, tensors_beside
from mpxla.tests.ranks.run import run_ranks

NUM_STEPS = 3


class Net(nn.Module):
    """Two layers of the same shapes: positions are all that tells them apart."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Kept(torch.optim.AdamW):
    """Updates float32 copies, and copies them back."""

    def __init__(self, params):
        super().__init__(params, lr=0.05)
        self.keep()

    def keep(self):
        self.copies = [_float(p) for p in _flat(self)]

    def copy_of(self, number, p):
        return self.copies[number]

    @torch.no_grad()
    def step(self, closure=None):
        before = [p.detach().clone() for p in _flat(self)]
        super().step()
        for number, (p, old) in enumerate(zip(_flat(self), before, strict=True)):
            self.copy_of(number, p).add_((p - old).float() * 1.5)  # its own rule shows it is used
            p.copy_(self.copy_of(number, p))


def _float(p):
    return p.detach().clone().float()


def _flat(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


class ByGroup(Kept):
    """As in the guide of NeuronX."""

    def keep(self):
        self.highprec = [{"params": [_float(p) for p in g["params"]]} for g in self.param_groups]

    def copy_of(self, number, p):
        return [c for group in self.highprec for c in group["params"]][number]


class InGroups(Kept):
    def keep(self):
        for group in self.param_groups:
            group["copies"] = tuple(_float(p) for p in group["params"])

    def copy_of(self, number, p):
        return [c for group in self.param_groups for c in group["copies"]][number]


class ByParameter(Kept):
    def keep(self):
        self.copies = {p: {"copy": _float(p)} for p in _flat(self)}

    def copy_of(self, number, p):
        return self.copies[p]["copy"]


class ById(Kept):
    def keep(self):
        self.copies = {id(p): _float(p) for p in _flat(self)}

    def copy_of(self, number, p):
        return self.copies[id(p)]


class ByNumber(Kept):
    def keep(self):
        self.copies = {i: _float(p) for i, p in enumerate(_flat(self))}
        self.factors = [1.0 + i for i in range(len(self.copies))]  # a number for each as well

    def copy_of(self, number, p):
        p.mul_(self.factors[number] / self.factors[number])
        assert len(self.factors) == len(self.copies) == len(_flat(self))
        return self.copies[number]


class Pairs(Kept):
    def keep(self):
        self.pairs = [(p, _float(p)) for p in _flat(self)]

    def copy_of(self, number, p):
        own, copy = self.pairs[number]
        assert own is p
        return copy


class Views(Kept):
    """Updates parameters by way of tensors that share their memory."""

    def keep(self):
        self.views = [p.data for p in _flat(self)]

    @torch.no_grad()
    def step(self, closure=None):
        for view, p in zip(self.views, _flat(self), strict=True):
            view.sub_(0.1 * p.grad)


class Lookahead(torch.optim.Optimizer):
    """Another optimizer inside, and slow weights."""

    def __init__(self, params):
        self.inner = torch.optim.AdamW(params, lr=0.05)
        super().__init__(self.inner.param_groups, {})
        self.slow = [[_float(p) for p in g["params"]] for g in self.param_groups]
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.calls += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, s in zip(group["params"], slow, strict=True):
                if self.calls % 2 == 0:
                    s.mul_(0.5).add_(p * 0.5)
                    p.copy_(s)


class Flat(Kept):
    def keep(self):
        self.master = torch.cat([_float(p).flatten() for p in _flat(self)])


class Unclear(Kept):
    def keep(self):
        self.some = [_float(p) for p in _flat(self)[:3]]


class Model(Kept):
    def keep(self):
        self.average = Net()


KINDS = {
    kind.__name__: kind
    for kind in (
        *(Kept, ByGroup, InGroups, ByParameter, ById, ByNumber, Pairs, Views, Lookahead),
        *(Flat, Unclear, Model),
    )
}
REFUSED = {
    "Flat": r"Flat keeps tensors of its parameters outside of its state, in master: one flat",
    "Unclear": r"in some: 3 values that do not go with them one by one\. Stages and replicas",
    "Model": r"in average: the module Net, which cannot be cut",
}


def groups_of(model):
    """Biases have a group of their own, so that positions are not those of the model."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 4, generator=generator)
    return x, torch.randn(4, 4, generator=generator)


def plain(kind):
    torch.manual_seed(2)
    model = Net()
    optimizer, losses = KINDS[kind](groups_of(model)), []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, model.state_dict()


@smp.step
def train_step(model, x, y):
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def train(kind, seed):
    torch.manual_seed(seed)
    raw = Net()
    inner = KINDS[kind](groups_of(raw))
    model = smp.DistributedModel(raw)
    optimizer, losses = smp.DistributedOptimizer(inner), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(train_step(model, *batch(step)).reduce_mean().item())
        optimizer.step()
    return losses, model.state_dict()


def train_all(config, kinds, differ):
    """Every kind in a session of its own; the text of an error in the place of values."""
    import os

    found = {}
    for kind in kinds:
        smp.init({"ddp": True, **config})
        try:
            found[kind] = train(kind, 2 + differ * int(os.environ["RANK"]))
        except MpxlaError as error:
            found[kind] = str(error)
        smp.shutdown()
    return found


TWO_STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "config", "kinds", "differ"),
    [
        pytest.param(1, {}, ["Views", "Lookahead"], 0, id="one", marks=pytest.mark.slow),
        pytest.param(2, TWO_STAGES, ["Kept", "ByGroup", "ByNumber", "Pairs"], 0, id="stages"),
        pytest.param(
            2,
            TWO_STAGES,
            ["InGroups", "ByParameter", "ById", "Views", "Lookahead"],
            0,
            id="other stages",
            marks=pytest.mark.slow,
        ),
        pytest.param(2, {}, ["Lookahead"], 5, id="replicas"),
        pytest.param(
            2,
            {"shard_optimizer_state": True},
            ["InGroups", "ByParameter", "ById"],
            5,
            id="divided",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_kept_of_parameters_follows_them(world_size, config, kinds, differ):
    for found in run_ranks(train_all, world_size, config, kinds, differ):
        for kind in kinds:
            losses, state = plain(kind)
            assert not isinstance(found[kind], str), found[kind]
            assert found[kind][0] == pytest.approx(losses, rel=1e-4), kind
            torch.testing.assert_close(found[kind][1], dict(state), rtol=1e-3, atol=1e-5)


@pytest.mark.unit
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_assigned_is_named(kind):
    model = Net()
    optimizer = KINDS[kind](groups_of(model))
    before = [list(group["params"]) for group in optimizer.param_groups]
    kept = {id(p) for p in model.first.parameters()}
    with pytest.raises(MpxlaError, match=REFUSED[kind]):
        follow_parameters(
            optimizer,
            before,
            lambda p: [Heir(p, "whole", torch.clone)] if id(p) in kept else [],
            lambda value: value,
        )


@pytest.mark.unit
def test_all_tensors_beside_the_state_are_found():
    model = Net()
    for kind, count in {
        "Kept": 4,
        "ByGroup": 4,
        "InGroups": 4,
        "Flat": 1,
        "ByParameter": 8,
    }.items():
        assert len(tensors_beside(KINDS[kind](groups_of(model)))) == count, kind
