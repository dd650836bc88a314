"""A step that one rank does not come to ends on all ranks with the table of what they do."""

import time

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.testing import run_ranks

pytestmark = pytest.mark.ranks


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def stay_away(stall_timeout_s):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "stall_timeout_s": stall_timeout_s})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    train(model, torch.ones(4, 4))
    started = time.monotonic()
    try:
        if smp.rank() == 1:
            time.sleep(6)  # the data loader hangs
        train(model, torch.ones(4, 4))
    except smp.PeerFailure as error:
        return str(error), time.monotonic() - started
    return None, time.monotonic() - started


def test_a_rank_that_stays_away_ends_the_job():
    (text, took_s), (other, _) = run_ranks(stay_away, 2, 1.5, timeout_s=120)
    assert text is not None and took_s < 5.9
    assert "no action completed for 1.5 s (stall_timeout_s)" in text
    assert "rank 1 waits for nobody and does not come; it is in test_stall.py:" in text
    assert "stay_away" in text
    assert "0B0" in text
    assert "not in a step" in text
    assert other is not None and "stall_timeout_s" in other


def test_a_rank_that_is_only_late_is_waited_for():
    assert [text for text, _ in run_ranks(stay_away, 2, 60.0, timeout_s=120)] == [None, None]
