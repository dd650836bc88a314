"""What the user changes in place is not changed for a message that has not left yet.

Messages are sent, and collectives run, by threads in the background. Here all of them are late.
"""

import contextlib
import time

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.comm import streams
from mpxla.comm.host import _Collectives
from mpxla.comm.streams import Outbox
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_training_habits import HABITS, check_against_plain, train_in_all_ways

pytestmark = pytest.mark.ranks

STEPS = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.embedding(ids))))


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight


@smp.step
def train_step(model, ids):
    logits = model(ids)
    loss = logits.square().mean()
    model.backward(loss)
    return loss, logits


def edit(model, results):
    """Changes in place whatever a step leaves behind."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        for result in results:
            result.mul_(3)


@contextlib.contextmanager
def late_messages(delay_s=0.1):
    deliver, collect, at_once_bytes = Outbox._deliver, _Collectives._do, streams._AT_ONCE_BYTES

    def deliver_late(outbox, message):
        time.sleep(delay_s)
        deliver(outbox, message)

    def collect_late(collectives, job):
        time.sleep(delay_s)
        collect(collectives, job)

    Outbox._deliver, _Collectives._do = deliver_late, collect_late
    streams._AT_ONCE_BYTES = -1  # all messages are sent later, by the thread
    try:
        yield
    finally:
        Outbox._deliver, _Collectives._do = deliver, collect
        streams._AT_ONCE_BYTES = at_once_bytes


def train_with_late_messages(build, microbatches):
    with late_messages():
        smp.init({"pipeline_parallel_degree": 2, "microbatches": microbatches})
        model = smp.DistributedModel(build())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        seen = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss, logits = train_step(model, torch.arange(6))
            edit(model, [*loss.outputs, *logits.outputs])
            optimizer.step()
            seen.append((loss.reduce_mean().cpu(), logits.concat().cpu()))
        return seen, model.state_dict()


def plain(build):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(torch.arange(6))
        loss = logits.square().mean()
        loss.backward()
        results = [loss.detach(), logits.detach()]
        edit(model, results)
        optimizer.step()
        seen.append(results)
    return seen, model.state_dict()


# With tied weights, a rank waits for a message that comes after the one with its results.
@pytest.mark.parametrize(
    ("build", "microbatches"),
    [
        pytest.param(Tied, 1, marks=pytest.mark.slow),
        (Tied, 3),
        pytest.param(Net, 3, marks=pytest.mark.slow),
    ],
)
def test_changes_in_place_do_not_reach_messages_under_way(build, microbatches):
    expected, weights = plain(build)
    for seen, state in run_ranks(train_with_late_messages, 2, build, microbatches):
        torch.testing.assert_close(seen, expected)
        torch.testing.assert_close(dict(state), dict(weights))


class Shifted(Tied):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.embedding.weight.add_(1)


def resume_with_late_messages(path):
    smp.init({"pipeline_parallel_degree": 2})
    model = smp.DistributedModel(Tied())
    train_step(model, torch.arange(6))
    smp.save_checkpoint(path, tag="first", model=model)
    smp.shutdown()
    with late_messages():
        smp.init({"pipeline_parallel_degree": 2})
        model = smp.DistributedModel(Shifted())
        smp.resume_from_checkpoint(path)
        loss, _ = train_step(model, torch.arange(6))
        return loss.reduce_mean().cpu(), model.state_dict()


@pytest.mark.slow
def test_values_of_a_checkpoint_come_after_those_under_way(tmp_path):
    loss = Tied()(torch.arange(6)).square().mean().detach()
    for seen, state in run_ranks(resume_with_late_messages, 2, str(tmp_path)):
        torch.testing.assert_close(seen, loss)
        torch.testing.assert_close(dict(state), dict(Tied().state_dict()))


EDITING_HABITS = (
    "norms_read_later",
    "accumulation_and_clipping",
    "clipping_by_value",
    "weights_changed_in_between",
    "zeros_instead_of_none",
    "layers_in_turns",
    "freezing_later",
    "groups_added_later",
)


def train_in_all_ways_late(config, names):
    with late_messages(0.02):
        return train_in_all_ways(config, names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "names"),
    [
        ("replicas", EDITING_HABITS[1::2]),
        ("grid", EDITING_HABITS[::4]),
        pytest.param("grid", EDITING_HABITS, marks=pytest.mark.long),
    ],
)
def test_habits_when_everything_is_late(world, names):
    assert set(names) <= set(HABITS)
    check_against_plain(train_in_all_ways_late, world, names)
