"""Averages of weights and other copies of the distributed model, against plain PyTorch."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)

import mpxla as smp
from mpxla.errors import MpxlaError
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 4
TWO = {"pipeline_parallel_degree": 2}
SHARED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 10}
SHARED |= {"sdp_gradient_clipping": 1e6}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x))))


def batch(step):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def average(model, kind):
    """Averages of every kind that torch has."""
    ways = {
        "mean": {},
        "swa": {"multi_avg_fn": get_swa_multi_avg_fn()},
        "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.7), "use_buffers": True},
        "each": {"avg_fn": get_ema_avg_fn(0.6)},
    }
    return AveragedModel(model, **ways[kind])


def loss_of(model, x):
    return model(x).square().mean()


@smp.step
def train_step(model, x):
    loss = loss_of(model, x)
    model.backward(loss)
    return loss


@smp.step
def evaluate(model, x):
    return loss_of(model, x)


def plain(kind, start):
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    averaged = average(model, kind) if start == 0 else None
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
        if step + 1 == start:
            averaged = average(model, kind)
        if averaged is not None:
            averaged.update_parameters(model)
            averaged.eval()
            losses.append(loss_of(averaged, batch(9)).item())
    return losses, dict(averaged.state_dict()), dict(model.state_dict())


def train(kind, start):
    torch.manual_seed(1)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    averaged = average(model, kind) if start == 0 else None
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        train_step(model, batch(step))
        optimizer.step()
        if step + 1 == start:
            averaged = average(model, kind)
        if averaged is not None:
            averaged.update_parameters(model)
            averaged.eval()
            losses.append(evaluate(averaged, batch(9)).reduce_mean().item())
            assert model.training and model.module.norm.training
        if averaged is not None:  # as a plain module on every rank
            with averaged.module.summon_full_params() as module, torch.no_grad():
                inside = loss_of(module, batch(9)).item(), loss_of(averaged, batch(9)).item()
            assert inside == pytest.approx((losses[-1], losses[-1]), rel=1e-4)
    state = averaged.state_dict()
    again = average(model, kind)
    again.load_state_dict(state)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in state.items())
    held = [p for p in averaged.parameters() if not p.is_meta] + list(averaged.module.tensors.parts)
    assert len(held) == len(list(model.local_parameters()))
    return losses, state, model.state_dict()


def train_all(config, cases):
    found = []
    for kind, start in cases:
        smp.init({"ddp": True, **config})
        found.append(train(kind, start))
        smp.shutdown()
    return found


@pytest.mark.parametrize(
    ("world_size", "config", "cases"),
    [
        pytest.param(1, {}, [("swa", 0)], id="one", marks=pytest.mark.slow),
        pytest.param(2, TWO, [("swa", 2)], id="stages"),
        pytest.param(2, TWO, [("mean", 0), ("ema", 0)], id="other stages", marks=pytest.mark.slow),
        pytest.param(2, {}, [("each", 1)], id="replicas", marks=pytest.mark.slow),
        pytest.param(2, SHARED, [("swa", 0)], id="shared"),
        pytest.param(2, SHARED, [("ema", 2), ("each", 1)], id="other", marks=pytest.mark.slow),
        pytest.param(4, TWO | SHARED, [("swa", 0), ("ema", 2)], id="4", marks=pytest.mark.slow),
    ],
)
def test_averages_of_weights_are_those_of_one_process(world_size, config, cases):
    for found in run_ranks(train_all, world_size, config, cases):
        for (kind, start), (losses, state, trained) in zip(cases, found, strict=True):
            expected = plain(kind, start)
            assert losses == pytest.approx(expected[0], rel=1e-4), (kind, start)
            for got, want in ((state, expected[1]), (trained, expected[2])):
                assert list(got) == list(want)
                torch.testing.assert_close(dict(got), want, rtol=1e-4, atol=1e-6)


def with_new_statistics(model, averaged, block, optimizer, step):
    for number in range(2):
        optimizer.zero_grad()
        step(model, batch(number))
        optimizer.step()
        averaged.update_parameters(model)
    with block():
        update_bn([batch(number) for number in range(3)], averaged)
    return averaged.state_dict()


def update_statistics():
    smp.init(TWO)
    torch.manual_seed(1)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    averaged = AveragedModel(model)
    block = averaged.module.summon_full_params
    return with_new_statistics(model, averaged, block, optimizer, train_step)


def test_statistics_of_averages_are_updated_in_a_block():
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(model, x):
        loss_of(model, x).backward()

    averaged = AveragedModel(model)
    expected = with_new_statistics(model, averaged, contextlib.nullcontext, optimizer, step)
    for found in run_ranks(update_statistics, 2):
        torch.testing.assert_close(dict(found), dict(expected), rtol=1e-4, atol=1e-6)


def copy_and_misuse():
    smp.init(TWO)
    torch.manual_seed(1)
    model = smp.DistributedModel(Net())
    early = copy.deepcopy(model)
    start = early.state_dict()
    train_step(model, batch(0))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    train_step(model, batch(0))
    optimizer.step()
    late = copy.deepcopy(early)
    found = {"start": start, "early": early.state_dict(), "late": late.state_dict()}
    with torch.no_grad():  # the average becomes the model
        for p, q in zip(model.parameters(), early.parameters(), strict=True):
            p.copy_(q)
    found["back"] = model.state_dict()
    texts = []
    closing = smp.step(lambda x: late(x))
    both = smp.step(lambda model, other, x: model(x) + other(x))
    for use in (
        lambda: late(batch(0)),
        lambda: both(model, late, batch(0)),
        lambda: train_step(late, batch(0)),
        lambda: closing(batch(0)),
    ):
        try:
            use()
        except MpxlaError as error:
            texts.append(str(error))
    return found, texts


def test_copies_have_values_of_their_own():
    for found, texts in run_ranks(copy_and_misuse, 2):
        start = found["start"]
        for name, value in start.items():
            for which in ("early", "late"):
                assert torch.equal(found[which][name], value), (which, name)
            if "running" not in name and "num_batches" not in name:
                assert torch.equal(found["back"][name], value), name
        assert "called outside a step function at " in texts[0]
        assert "use AveragedModel(model, use_buffers=True)" in texts[0]
        assert "with another one, or with the model itself" in texts[1]
        assert "Copies are for evaluation; train the model itself" in texts[2]
        assert "Pass the copy (or the AveragedModel) in the place of the model" in texts[3]


def average_by_state_dict(config):
    smp.init(config)
    torch.manual_seed(1)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    averaged = copy.deepcopy(model)
    for step in range(2):
        optimizer.zero_grad()
        train_step(model, batch(step))
        optimizer.step()
        new = model.state_dict()
        for name, value in averaged.state_dict().items():
            value.copy_(new[name])
    losses = [evaluate(used, batch(2)).reduce_mean() for used in (averaged, model)]
    return averaged.state_dict(), model.state_dict(), losses


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_averages_may_be_written_to_a_state_dict(world_size):
    config = TWO if world_size == 2 else {}
    for found, wanted, losses in run_ranks(average_by_state_dict, world_size, config):
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0)
        assert torch.equal(*losses)
