"""Views of parameters that a script takes before updates follow them, as in plain PyTorch.

And what is written through them reaches the device.
"""

import itertools

import pytest
import torch
from torch import nn

from mpxla.tests.backends import name_here
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.tolerances import assert_close_by_norm

pytestmark = pytest.mark.ranks

KINDS = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "index": lambda p: p[0],
    "view": lambda p: p.view(-1),
}


def net(dtype=torch.float32):
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def train(model, optimizer, step):
    """Losses, parameters, and whether all views had the numbers of their parameters.

    There are other views in every update, and none in the first two and the last two.
    """
    x, losses, follow, held = torch.linspace(-1, 1, 16).view(4, 4), [], [], []
    views: dict = {}
    for number in range(8):
        optimizer.zero_grad()
        losses.append(float(step(model, x.to(next(model.parameters()).dtype))))
        optimizer.step()
        follow += [torch.equal(of(p).detach(), v.detach()) for p, of, v in held]
        if number % 2 and held:  # through one kind of view, which the others see
            with torch.no_grad():
                views["detach"].mul_(0.5)
                views["index"].add_(0.25)
        parameters = list(model.parameters())
        views = {} if number in (0, 6) else {k: f(parameters[0]) for k, f in KINDS.items()}
        held = [(parameters[0], KINDS[kind], view) for kind, view in views.items()]
    weights = {str(i): p.detach().cpu().float().clone() for i, p in enumerate(model.parameters())}
    return losses, weights, follow


def train_here(config, dtype):
    """Runs on every rank: `train`, and whether a snapshot on the device kept its numbers."""
    import mpxla as smp

    smp.init(config)
    model = smp.DistributedModel(net(dtype))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 0.05))

    @smp.step
    def step(model, x):
        loss = loss_of(model, x)
        model.backward(loss)
        return loss

    found = train(model, optimizer, lambda model, x: step(model, x).reduce_mean())
    best = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = {name: value.cpu().clone() for name, value in best.items()}
    model.load_state_dict(best)
    seen = [parameter.detach() for parameter in model.parameters()]
    step(model, torch.ones(4, 4, dtype=dtype))
    optimizer.step()
    kept = all(torch.equal(best[name].cpu(), value) for name, value in numbers.items())
    follows = all(map(torch.equal, seen, (p.detach() for p in model.parameters())))
    return *found, kept and follows


def train_plainly(model, x):
    loss = loss_of(model, x)
    loss.backward()
    return loss.detach()


OTHER = {"MPXLA_DEVICE": "pjrt" if name_here() == "torch_xla" else "eager"}


BACKENDS = {"default": {}, "other": OTHER}
DTYPES = {"float32": torch.float32, "masters": torch.bfloat16}
KEYS = (None, "shard_optimizer_state")
CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] * (case[2] == "other"))
    for number, case in enumerate(itertools.product(KEYS, DTYPES, BACKENDS))
    if number.bit_count() % 2 == 0  # every two of the settings meet
]


@pytest.mark.parametrize(("key", "dtype", "backend"), CASES)
def test_views_follow_updates_and_writes_reach_the_device(key, dtype, backend):
    dtype, env = DTYPES[dtype], BACKENDS[backend]
    config = {"microbatches": 2, "ddp": True, **({} if key is None else {key: True})}
    plain = net(dtype).float()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), 0.05), train_plainly)
    assert all(expected[2])
    ranks = run_ranks(train_here, 1 if key is None else 2, config, dtype, env=env)
    for losses, weights, follow, is_right in ranks:
        assert len(follow) == 20 and all(follow)
        assert is_right
        tolerance = 1e-4 if dtype is torch.float32 else 0.05
        assert losses == pytest.approx(expected[0], rel=tolerance)
        assert_close_by_norm(weights, expected[1], tolerance)
