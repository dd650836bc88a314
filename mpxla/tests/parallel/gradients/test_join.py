"""Replicas with different numbers of batches: inside `join`, and without it an error everywhere."""

import re
import time

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks, run_ranks_unpooled

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def batch(replica, number):
    torch.manual_seed(100 * replica + number)
    return torch.randn(4, 4)


def train_unevenly(stages, counts):
    """Replica i has counts[i] batches."""
    smp.init({"ddp": True, "pipeline_parallel_degree": stages})
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    replica = smp.rdp_rank()
    with model.join():
        for number in range(counts[replica]):
            optimizer.zero_grad()
            train(model, batch(replica, number))
            optimizer.step()
    state = optimizer.state_dict()["state"]
    optimizer.zero_grad()
    train(model, batch(replica, 99))  # the replicas are together again
    optimizer.step()
    return model.state_dict(), {n: s["momentum_buffer"] for n, s in state.items()}


def expected_of(counts):
    """Gradients are sums over the replicas that have a batch, divided by all."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    rounds = [[r for r, n in enumerate(counts) if number < n] for number in range(max(counts))]
    momentum = {}
    for number, present in enumerate([*rounds, list(range(len(counts)))]):
        number = 99 if number == len(rounds) else number
        if number == 99:
            states = optimizer.state_dict()["state"].items()
            momentum = {n: s["momentum_buffer"].clone() for n, s in states}
        optimizer.zero_grad()
        start = {n: b.clone() for n, b in model.named_buffers()}
        for replica in reversed(present):
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])  # those of the first replica that has a batch count
            (model(batch(replica, number)).square().mean() / len(counts)).backward()
        optimizer.step()
    return model.state_dict(), momentum


@pytest.mark.parametrize(
    ("stages", "counts"),
    [
        (1, (2, 4)),
        pytest.param(2, (3, 1), marks=pytest.mark.slow),
        pytest.param(1, (2, 2), marks=pytest.mark.slow),
    ],
)
def test_replicas_may_run_out_of_batches(stages, counts):
    results = run_ranks(train_unevenly, len(counts) * stages, stages, counts)
    weights, momentum = expected_of(counts)
    for found, buffers in results:
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        for position, value in momentum.items():
            torch.testing.assert_close(buffers[position], value, rtol=1e-4, atol=1e-5)


def join_wrongly():
    texts = []

    def attempt(config, use):
        smp.init({"ddp": True, **config})
        model = smp.DistributedModel(Net())
        try:
            use(model)
        except smp.ConfigError as error:
            texts.append(str(error))
        smp.shutdown()

    def enter(model):
        with model.join():
            pass

    def enter_twice(model):
        with model.join(), model.join():
            pass

    def enter_with_hook(model):
        model.register_comm_hook(None, lambda state, bucket: None)
        enter(model)

    attempt({"shard_optimizer_state": True}, enter)
    attempt({}, enter_twice)
    attempt({}, enter_with_hook)
    attempt({}, enter)
    return texts


def test_what_does_not_go_with_join():
    for texts in run_ranks(join_wrongly, 2):
        assert len(texts) == 3
        assert "with shard_optimizer_state: True, where every update needs all" in texts[0]
        assert "used inside another model.join()" in texts[1]
        assert "with a comm hook, which replicas without batches cannot call" in texts[2]


def disagree_in_join():
    smp.init({"ddp": True})
    model = smp.DistributedModel(Net())

    @smp.step
    def train_a_part(model, x):
        loss = model.module.first(x).square().mean()
        model.backward(loss)
        return loss

    with model.join():
        (train if smp.rank() == 0 else train_a_part)(model, batch(0, 0))


@pytest.mark.slow
def test_different_steps_in_join_are_named():
    results = run_ranks_unpooled(disagree_in_join, 2)
    assert all(result.exit_code == 1 for result in results)
    assert any("Call the same step functions in the same order" in r.stderr for r in results)


def stop_early(ends_itself):
    smp.init({"ddp": True})
    model = smp.DistributedModel(Net())
    for number in range(3 if smp.rank() == 0 else 2):
        train(model, batch(0, number))
    if ends_itself:
        smp.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("ends_itself", [True, False])
def test_without_join_the_numbers_are_named_on_all_ranks(ends_itself):
    """No hang, whether the scripts end with smp.shutdown() or just end."""
    first, second = run_ranks_unpooled(stop_early, 2, ends_itself, timeout_s=120)
    assert first.exit_code == 1
    assert (
        "RankMismatch: replicas have different numbers of training steps: rank 0 has 3, and "
        in (first.stderr)
    )
    assert "rank 1 ended after 2. Give all replicas the same number of batches" in first.stderr
    assert "rank 0 has 3, and rank 1 ended after 2" in second.stderr
    assert "This rank ended after 2 training steps" in second.stderr
    if ends_itself:
        assert second.exit_code == 1


def stop_early_in_a_pipeline(slow_rank):
    """The second of two replicas of two stages has fewer batches; one rank hears of it late."""
    smp.init({"ddp": True, "pipeline_parallel_degree": 2, "shard_optimizer_state": True})
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(3 if smp.rdp_rank() == 0 else 2):
        train(model, batch(0, number))
        optimizer.step()
    if smp.rank() == slow_rank:
        while smp.session.current().transport.watch.failure is None:
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("slow_rank", [None, 3])
def test_without_join_the_numbers_are_named_on_all_ranks_of_pipelines(slow_rank):
    results = run_ranks_unpooled(stop_early_in_a_pipeline, 4, slow_rank, timeout_s=120)
    for rank, result in enumerate(results):
        assert re.search(r"rank \d has 3, and rank \d ended after 2", result.stderr), rank
    assert [result.exit_code for result in results[:2]] == [1, 1]


def differ_by_a_whole_epoch():
    """Rank 1 is not waited for, but did less."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(Net())
    train(model, batch(0, 0))
    if smp.rank() == 0:
        model._reducer.rounds.count_step()
    try:
        smp.shutdown()
    except smp.RankMismatch as error:
        return str(error)


def test_numbers_are_compared_at_the_end():
    first, second = run_ranks(differ_by_a_whole_epoch, 2)
    assert "rank 0 has 2, and rank 1 ended after 1" in first
    assert "rank 1 has 1, and rank 0 ended after 2" in second
