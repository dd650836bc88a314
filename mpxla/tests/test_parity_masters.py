"""16-bit parameters with float32 masters, against plain PyTorch that does the same by hand.

The reference keeps a float32 tensor for every parameter, adds the gradients of all microbatches to
it in float32, updates it, and copies it to the bfloat16 parameter.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.parallel.updates.optimizer_state import MASTER_KEY
from mpxla.session import current
from mpxla.tests.ranks.run import run_ranks

NUM_STEPS = 10
BF16 = torch.bfloat16
WIDTH = 24
EXACT = 2e-5
"""In units of how far parameters have moved: where gradients are exact, only the rounding of
updates in float32 is left."""
ROUNDED = 0.02
"""The same for a network in bfloat16, whose gradients XLA and PyTorch round in other places."""


class Exact(nn.Module):
    """Layers whose gradient is the input itself, whatever their weights: nothing is rounded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(4))

    def forward(self, x):
        return torch.stack([(layer * x).sum() for layer in self.layers]).sum()


class Net(nn.Module):
    """A network with a norm, whose gradients are rounded on the way."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.enter, self.norm = nn.Linear(WIDTH, 16), nn.LayerNorm(16)
        self.leave = nn.Linear(16, 4)

    def forward(self, x):
        return self.leave(torch.tanh(self.norm(self.enter(x)))).float().square().mean()


class Tied(nn.Module):
    """The first and the last layer have one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.leave.weight = self.enter.weight

    def forward(self, x):
        x = torch.tanh(self.middle(torch.tanh(self.enter(x))))
        return self.leave(x).float().square().mean()


@smp.step
def train_step(model, x):
    loss = model(x)
    model.backward(loss)
    return loss


def batch(number, samples, dtype=BF16):
    """One sample is small where the next one is large: their sum needs more than 8 bits."""
    generator = torch.Generator().manual_seed(number)
    x = torch.rand(samples, WIDTH, generator=generator) + 0.5
    scale = torch.where(torch.arange(samples) % 2 == 0, 1.0, 2.0**-7)
    return (x * scale[:, None]).to(dtype)


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        kind: the model.
        replicas: how many.
        stages: of each.
        is_sharded: `shard_optimizer_state`.
        passes: step calls per update.
        max_norm: clips gradients, if given.
    """

    kind: type[nn.Module]
    replicas: int = 1
    stages: int = 1
    is_sharded: bool = False
    passes: int = 1
    max_norm: float | None = None

    @property
    def samples(self) -> int:
        return self.replicas * (1 if self.kind is Exact else 4)

    def __str__(self) -> str:
        words = [self.kind.__name__.lower(), f"{self.replicas}x{self.stages}"]
        words += ["zero"] * self.is_sharded + [f"passes{self.passes}"] * (self.passes > 1)
        return "-".join(words + ["clipped"] * (self.max_norm is not None))


def start(case, raw, has_masters=True):
    smp.init(
        {
            "ddp": True,
            "pipeline_parallel_degree": case.stages,
            "shard_optimizer_state": case.is_sharded,
        }
    )
    config = copy.copy(current().config)
    object.__setattr__(config, "bf16", has_masters)
    current().config = config
    return smp.DistributedModel(raw, backward_passes_per_step=case.passes)


def adamw(kind, parameters):
    """With a large eps, so that an update depends on the size of a gradient, where it is exact."""
    settings = {"lr": 1e-2, "eps": 1.0} if kind is Exact else {"lr": 3e-4, "eps": 1e-6}
    return torch.optim.AdamW(parameters, weight_decay=0.1, **settings)


def masters_of(model, optimizer):
    """Masters by name, on the host."""
    names = [name for name, _ in model.module.named_parameters()]
    state = optimizer.state_dict()["state"]
    return {name: state[position][MASTER_KEY] for position, name in enumerate(names)}


def update(case, model, optimizer, number):
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    for inner in range(case.passes):
        x = batch(number * case.passes + inner, case.samples, dtype)
        train_step(model, x.chunk(case.replicas)[smp.rdp_rank()])
    if case.max_norm is not None:
        smp.clip_grad_norm_(model.parameters(), case.max_norm)
    optimizer.step()


def train(case):
    model = start(case, case.kind().to(BF16))
    optimizer = smp.DistributedOptimizer(adamw(case.kind, model.parameters()))
    for number in range(NUM_STEPS):
        update(case, model, optimizer, number)
    local = dict(model.local_named_parameters())
    given = [p.grad for p in local.values() if p.grad is not None]  # those of masters
    are_plain = all(p.dtype is BF16 for p in local.values())
    are_plain = are_plain and all(grad.dtype is torch.float32 for grad in given)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    are_wide = all(p.dtype is torch.float32 for p in held)
    return masters_of(model, optimizer), model.state_dict(), are_plain and are_wide


def train_by_hand(case, sums=torch.float32, updates=torch.float32):
    """Masters after the same steps; with other types, what a worse implementation gives."""
    model = case.kind().to(BF16)
    names = [name for name, _ in model.named_parameters()]
    masters = [nn.Parameter(p.detach().to(updates)) for p in model.parameters()]
    optimizer = adamw(case.kind, masters)
    for number in range(NUM_STEPS):
        totals = [torch.zeros_like(p, dtype=sums) for p in masters]
        for inner in range(case.passes):
            for x in batch(number * case.passes + inner, case.samples).chunk(case.replicas):
                model.zero_grad()
                model(x).backward()
                for total, parameter in zip(totals, model.parameters(), strict=True):
                    total += parameter.grad.to(sums) / case.replicas
        for master, total in zip(masters, totals, strict=True):
            master.grad = total.to(updates)
        if case.max_norm is not None:
            nn.utils.clip_grad_norm_(masters, case.max_norm)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return {name: m.detach().float() for name, m in zip(names, masters, strict=True)}


def distance(found, expected, origin):
    """Norm of the difference of all parameters, in units of the way that they have gone."""
    moved = torch.cat([(expected[n] - origin[n]).flatten() for n in origin]).norm()
    return (torch.cat([(found[n] - expected[n]).flatten() for n in origin]).norm() / moved).item()


def check(case):
    expected = train_by_hand(case)
    origin = {n: p.detach().float() for n, p in case.kind().to(BF16).named_parameters()}
    bound = EXACT if case.kind is Exact else ROUNDED
    for masters, state, are_typed in run_ranks(train, case.replicas * case.stages, case):
        assert are_typed, "gradients and updates are on masters of 32 bits"
        assert distance(masters, expected, origin) < bound
        for name, value in masters.items():
            assert torch.equal(state[name], value.to(BF16)), name
    assert distance(train_by_hand(case, updates=BF16), expected, origin) > 2 * bound
    if case.kind is Exact and case.replicas * case.passes > 1:
        assert distance(train_by_hand(case, sums=BF16), expected, origin) > 2 * bound


CASES = [
    Case(Exact, 2, 2, is_sharded=True),
    Case(Exact, 2, 1, passes=2, max_norm=0.5),
    Case(Net, 1, 2),
]
SLOW = [
    Case(Exact, 3, 1, is_sharded=True, passes=2),
    Case(Net, max_norm=0.3),
    Case(Net, 2, 1, passes=2),
    Case(Net, 2, 2, is_sharded=True, max_norm=0.3),
    Case(Tied, 1, 2, max_norm=0.3),
    Case(Tied, 2, 2, is_sharded=True, passes=2),
]
LONG = [
    Case(Exact, passes=2),
    Case(Exact, 2, 1, is_sharded=True, max_norm=0.5),
    Case(Exact, 2, 2, passes=2),
    Case(Net, 3, 1, is_sharded=True, passes=2),
    Case(Tied, 2, 2, max_norm=0.3),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (not case.is_sharded)) for case in CASES],
    ids=str,
)
def test_masters_train_as_those_of_one_process(case):
    check(case)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "case", [*SLOW, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)], ids=str
)
def test_masters_train_as_those_of_one_process_everywhere(case):
    check(case)


def train_outside(max_norm):
    """Plain backward calls outside of step functions, two for each update."""
    case = Case(Exact)
    model = start(case, Exact().to(BF16))
    optimizer = smp.DistributedOptimizer(adamw(Exact, model.parameters()))
    norms = []
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        for x in batch(number, 4).chunk(4)[smp.rdp_rank() :: smp.rdp_size()]:
            model(x.to(current().device)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return masters_of(model, optimizer), norms


@pytest.mark.ranks
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_of_a_plain_backward_reach_the_masters(replicas):
    """Autograd adds up in bfloat16, so that is what the reference does in each process."""
    model = Exact().to(BF16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer, expected = adamw(Exact, masters), []
    for number in range(NUM_STEPS):
        totals = [torch.zeros_like(master) for master in masters]
        for replica in range(replicas):
            model.zero_grad()
            for x in batch(number, 4).chunk(4)[replica::replicas]:
                model(x).backward()
                if replicas > 1:  # reduced after each backward
                    for total, p in zip(totals, model.parameters(), strict=True):
                        total += p.grad.float() / replicas
                    model.zero_grad()
            if replicas == 1:
                totals = [p.grad.float() for p in model.parameters()]
        for master, total in zip(masters, totals, strict=True):
            master.grad = total
        expected.append(nn.utils.clip_grad_norm_(masters, 2.0).item())
        optimizer.step()
    for found, norms in run_ranks(train_outside, replicas, 2.0):
        assert norms == pytest.approx(expected, rel=1e-5)
        for value, master in zip(found.values(), masters, strict=True):
            torch.testing.assert_close(value, master.detach(), rtol=1e-6, atol=1e-7)
