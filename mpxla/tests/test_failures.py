"""A rank that raises or is killed ends all other ranks soon, with an error that names it."""

import os
import re
import signal
import time

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.tests.ranks.run import run_ranks_unpooled

pytestmark = pytest.mark.ranks

# What is promised is 15 s; a slow machine adds the time of its own work.
SOON_S = 15.0
NUM_RANKS = 3
slow = pytest.mark.slow


class Deep(nn.Sequential):
    """One block for every rank."""

    def __init__(self):
        super().__init__(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(NUM_RANKS)))


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def in_the_middle_of_a_step(model, action):
    """Lets `action` happen when this rank has done its second task of the next step."""
    from mpxla.runtime.executor import Executor

    original, done = Executor.run_action, []

    def run(self, task, step):
        original(self, task, step)
        done.extend([task] * task.op.is_compute)
        if len(done) == 2:
            action()

    Executor.run_action = run
    train(model, torch.ones(8, 4))


def kill_self():
    print(f"ends at {time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error():
    print(f"ends at {time.time()}", flush=True)
    raise ValueError("this rank has had enough")


def train_with_a_failure(failing, action):
    smp.init({"pipeline_parallel_degree": NUM_RANKS, "microbatches": 4})
    torch.manual_seed(0)
    model = smp.DistributedModel(Deep())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, torch.ones(8, 4))
    optimizer.step()
    if smp.rank() == failing:
        if action == "raise outside":
            raise_error()
        in_the_middle_of_a_step(model, kill_self if action == "kill" else raise_error)
    for _ in range(3):
        optimizer.zero_grad()
        loss = train(model, torch.ones(8, 4))
        optimizer.step()
    return loss.reduce_mean().item()


def ends_of(results, failing):
    """Last error line of every other rank; all have ended soon after the failing one."""
    others = [rank for rank in range(NUM_RANKS) if rank != failing]
    assert [results[rank].exit_code for rank in others] == [1] * len(others)
    for rank in others:
        assert results[rank].duration_s - results[failing].duration_s < SOON_S
    return [last_error(results[rank].stderr) for rank in others]


def last_error(stderr):
    line = next(line for line in reversed(stderr.splitlines()) if "PeerFailure" in line)
    return re.sub(r"PeerFailure at \S+: ", "PeerFailure: ", line)  # of a rank that says it shortly


@pytest.mark.parametrize(
    "failing", [0, pytest.param(1, marks=[slow, pytest.mark.long]), pytest.param(2, marks=slow)]
)
def test_killed_rank_is_named_by_all_others(failing):
    results = run_ranks_unpooled(train_with_a_failure, NUM_RANKS, failing, "kill")
    assert results[failing].exit_code == -signal.SIGKILL
    assert "ends at" in results[failing].stdout, "it was killed where the test meant it to be"
    for text in ends_of(results, failing):
        assert f"PeerFailure: rank {failing} " in text
        assert "died: its process ended without a report" in text


@pytest.mark.parametrize(
    "failing", [pytest.param(0, marks=slow), 1, pytest.param(2, marks=[slow, pytest.mark.long])]
)
def test_rank_that_raises_in_a_step_is_named_with_its_error(failing):
    results = run_ranks_unpooled(train_with_a_failure, NUM_RANKS, failing, "raise")
    assert results[failing].exit_code == 1
    assert "ValueError: this rank has had enough" in results[failing].stderr
    assert "PeerFailure" not in results[failing].stderr
    for text in ends_of(results, failing):
        assert f"PeerFailure: rank {failing} raised ValueError in step function " in text
        assert "train: this rank has had enough" in text


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.long)])
def test_rank_that_raises_between_steps_is_named_with_its_error(failing):
    results = run_ranks_unpooled(train_with_a_failure, NUM_RANKS, failing, "raise outside")
    assert results[failing].exit_code == 1
    for text in ends_of(results, failing):
        assert f"PeerFailure: rank {failing} raised ValueError in the training script: " in text
        assert "this rank has had enough" in text


def train_and_leave(leaving):
    """A rank whose data has run out returns from its script while the others go on."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(Deep())
    for _ in range(1 if smp.rank() == leaving else 2):
        train(model, torch.ones(4, 4)).reduce_mean()


@pytest.mark.slow
@pytest.mark.parametrize("leaving", [0, 1])
def test_rank_that_leaves_early_is_named(leaving):
    results = run_ranks_unpooled(train_and_leave, 2, leaving)
    other = results[1 - leaving]
    assert results[leaving].exit_code == 0
    assert other.exit_code == 1
    assert f"PeerFailure: rank {leaving} " in last_error(other.stderr)
    assert other.duration_s - results[leaving].duration_s < SOON_S


def train_in_order():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(Deep())
    return train(model, torch.ones(4, 4)).reduce_mean().item()


def test_without_a_failure_everybody_ends_quietly():
    results = run_ranks_unpooled(train_in_order, 2)
    assert [result.exit_code for result in results] == [0, 0]
    assert results[0].value == results[1].value
    assert not any("Error" in result.stderr for result in results), results[0].stderr
