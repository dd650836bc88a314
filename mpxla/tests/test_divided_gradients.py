"""Scripts read, change, assign and clear `param.grad` where replicas divide updates."""

import re

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks, run_ranks_unpooled

JAX = {"MPXLA_DEVICE": "pjrt"}
KEYS = {
    "shard_optimizer_state": {"shard_optimizer_state": True},
    "shard_gradients": {"shard_gradients": True, "sdp_param_persistence_threshold": 4},
    "sharded_data_parallel_degree": {
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 4,
        "sdp_gradient_clipping": 1e9,
    },
}


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def exchange(parameter):
    parameter.grad = parameter.grad + 0.1


def through_data(parameter):
    parameter.grad.data.clamp_(-0.01, 0.01)


def assign(parameter):
    parameter.grad = torch.ones_like(parameter.grad)


def clear(parameter):
    parameter.grad = None


def clip(parameter):
    parameter.grad.mul_(3.0)
    nn.utils.clip_grad_norm_([parameter], 0.05)
    parameter.grad.add_(0.02)


CHANGES = [lambda p: p.grad.mul_(0.5), exchange, through_data, assign, clear, clip]


def loop(model, optimizer, backward):
    """Weights after a training loop, and the norms of gradients that it logs."""
    norms = []
    for number, change in enumerate(CHANGES):
        if number % 2:
            optimizer.zero_grad()
        else:
            for parameter in model.parameters():
                parameter.grad = None
        backward(batch(number))
        first, *_, last = model.parameters()
        change(first)
        if number == 3:  # the next pass adds to what is there
            backward(batch(number + 100))
        change(last)
        norms += [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return norms


def train(key):
    smp.init({"ddp": True, **KEYS[key]})
    model = smp.DistributedModel(made())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.1))

    @smp.step
    def step(model, x):
        model.backward(model(x).square().mean())

    norms = loop(model, optimizer, lambda x: step(model, x.chunk(smp.dp_size())[smp.dp_rank()]))
    return norms, model.state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("key", "env", "size"),
    [
        ("shard_optimizer_state", JAX, 2),
        ("sharded_data_parallel_degree", JAX, 2),
        pytest.param("sharded_data_parallel_degree", JAX, 4, marks=pytest.mark.slow),
        pytest.param("shard_gradients", JAX, 2, marks=pytest.mark.slow),
        *(pytest.param(key, {}, 2, marks=pytest.mark.slow) for key in KEYS),
    ],
)
def test_gradients_in_the_hands_of_scripts(key, env, size):
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    expected = loop(model, optimizer, lambda x: model(x).square().mean().backward())
    for norms, found in run_ranks(train, size, key, env=env):
        assert norms == pytest.approx(expected)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name].cpu(), value)


def read_alone():
    smp.init({"ddp": True, "shard_optimizer_state": True})
    model = smp.DistributedModel(made())
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

    @smp.step
    def step(model, x):
        model.backward(model(x).square().mean())

    step(model, batch(0))
    parameter, other = list(model.parameters())[:2]
    with pytest.raises(smp.RankMismatch, match=r"param\.grad of 0\.(weight|bias) at .*\.norm\(\)"):
        (parameter if smp.rank() == 0 else other).grad.norm()


@pytest.mark.slow
@pytest.mark.ranks
def test_replicas_that_read_other_gradients():
    run_ranks(read_alone, 2)


def read_on_one_rank(key):
    smp.init({"ddp": True, **KEYS[key]})
    model = smp.DistributedModel(made())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

    @smp.step
    def step(model, x):
        model.backward(model(x).square().mean())

    for number in range(3):
        optimizer.zero_grad()
        step(model, batch(number))
        optimizer.step()
    step(model, batch(0))
    if smp.rank() == 0:
        next(model.parameters()).grad.norm()
    optimizer.step()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "key",
    [
        "shard_optimizer_state",
        pytest.param("sharded_data_parallel_degree", marks=pytest.mark.slow),
    ],
)
def test_a_read_on_one_rank_ends_all(key):
    reader, other = run_ranks_unpooled(read_on_one_rank, 2, key)
    assert re.search(
        r"RankMismatch: rank 1 called optimizer\.step\(\) of SGD at .*, while rank 0 was in "
        r"param\.grad of 0\.weight at .*\.grad\.norm\(\).*outside of `if smp\.rank\(\) == 0:`",
        reader.stderr,
    )
    assert "param.grad of 0.weight" in other.stderr
