"""Stochastic rounding in training: on several ranks, and after a restart."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.session import current
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.wrong_uses import check_texts, refused

pytestmark = pytest.mark.ranks
NUM_STEPS = 20
WIDTH = 1500
RATE = 2.0**-10
"""Half an ulp of the parameters is twice as much, or more."""


class Sums(nn.Module):
    """Gradients are the sums of inputs, which bfloat16 holds exactly: nothing else is rounded."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.full((WIDTH,), v)) for v in (0.75, 1.5))

    def forward(self, x):
        return ((self.first * x).sum(-1) + (self.second * x).sum(-1)).mean()


@smp.step
def train_step(model, x):
    loss = model(x)
    model.backward(loss)
    return loss


def start(config, momentum=0.0):
    smp.init({"microbatches": 2, "bf16": True, **config})
    model = smp.DistributedModel(Sums())
    torch.manual_seed(11 + smp.rank())  # rank 0 decides
    inner = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    return model, smp.DistributedOptimizer(inner)


def run_steps(model, optimizer, numbers):
    for number in numbers:
        signs = torch.ones(4, WIDTH)
        signs[:, : WIDTH // 2] = 1 - 2 * (number % 2)  # to and fro in the first half
        optimizer.zero_grad()
        train_step(model, signs)
        optimizer.step()


def values_of(model):
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def train(config, momentum=0.0):
    model, optimizer = start(config, momentum)
    run_steps(model, optimizer, range(NUM_STEPS))
    held = [p.dtype for group in optimizer.param_groups for p in group["params"]]
    found = values_of(model), set(held), current().backend.num_compilations
    smp.shutdown()
    return found


def train_twice(config):
    return [train({"master_dtype": "same"}), train(config), train(config)]


ROUNDED = {"stochastic_rounding": True}
REPLICAS = {**ROUNDED, "ddp": True, "microbatches": 1}
ZERO = {**REPLICAS, "shard_optimizer_state": True}


@pytest.mark.slow
def test_updates_below_half_an_ulp_are_not_lost():
    ((stalled, *_), (moved, dtypes, _), (again, *_)) = run_ranks(train_twice, 1, ROUNDED)[0]
    assert dtypes == {torch.bfloat16}
    for name, begin in (("first", 0.75), ("second", 1.5)):
        assert (stalled[name] == begin).all()
        assert torch.equal(moved[name], again[name])
        there, back = moved[name].float().flip(0).view(2, -1)
        # The standard deviation of a mean of 750: sqrt(20 updates * (RATE / 1 ulp) / 750) ulp.
        assert there.mean().item() == pytest.approx(begin - NUM_STEPS * RATE, abs=6e-4 * begin * 4)
        assert back.mean().item() == pytest.approx(begin, abs=6e-4 * begin * 4)


@pytest.mark.parametrize(
    ("config", "num_ranks", "env"),
    [
        (ZERO, 2, {}),
        pytest.param(REPLICAS, 2, {}, marks=pytest.mark.slow),
        pytest.param({**ZERO, "pipeline_parallel_degree": 2}, 4, {}, marks=pytest.mark.slow),
        pytest.param(ZERO, 2, {"MPXLA_DEVICE": "pjrt"}, marks=pytest.mark.slow),
    ],
    ids=["zero1", "replicas", "both", "pjrt-zero1"],
)
def test_every_topology_rounds_alike(config, num_ranks, env):
    (expected, *_) = run_ranks(train, 1, ROUNDED, 0.5)[0]
    for found, dtypes, _ in run_ranks(train, num_ranks, config, 0.5, env=env):
        assert dtypes == {torch.bfloat16}
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def save_in_the_middle(path, config):
    model, optimizer = start(config, 0.5)
    run_steps(model, optimizer, range(8))
    smp.save_checkpoint(path, "eighth", model=model, optimizer=optimizer)
    state = optimizer.state_dict()["stochastic_rounding"]
    run_steps(model, optimizer, range(8, NUM_STEPS))
    found = values_of(model), state
    smp.shutdown()
    return found


def go_on(path, config):
    torch.manual_seed(99)
    model, optimizer = start(config, 0.5)
    torch.manual_seed(99)
    smp.resume_from_checkpoint(path, "eighth")
    run_steps(model, optimizer, range(8, NUM_STEPS))
    found = values_of(model)
    smp.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(({}, 1), ({}, 1)), ((ZERO, 2), ({}, 1)), (({}, 1), (ZERO, 2))],
    ids=["one", "from-zero1", "to-zero1"],
)
def test_a_restart_rounds_as_no_restart(tmp_path, saved, loaded):
    configs = [({**ROUNDED, **config}, size) for config, size in (saved, loaded)]
    (expected, state) = run_ranks(save_in_the_middle, configs[0][1], tmp_path, configs[0][0])[0]
    assert state == {"seed": 11, "num_updates": 8}
    for found in run_ranks(go_on, configs[1][1], tmp_path, configs[1][0]):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def train_in_float32():
    smp.init({"stochastic_rounding": True})
    model = smp.DistributedModel(nn.Linear(2, 2))
    return refused(lambda: smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)))


def test_a_model_in_float32_is_refused():
    check_texts(run_ranks(train_in_float32, 1), smp.ConfigError, "all parameters .* are float32")
