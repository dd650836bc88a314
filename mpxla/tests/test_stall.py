"""A step that one rank does not come to ends on all ranks with the table of what they do."""

import re
import time

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.checkpoint import save
from mpxla.errors import RankMismatch
from mpxla.testing import run_ranks

pytestmark = pytest.mark.ranks


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def stay_away(stall_timeout_s, file):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "stall_timeout_s": stall_timeout_s})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    train(model, torch.ones(4, 4))
    try:
        if smp.rank() == 1:
            while file is not None and not file.exists():  # the data loader hangs
                time.sleep(0.05)
            time.sleep(2)
        train(model, torch.ones(4, 4))
    except smp.PeerFailure as error:
        if smp.rank() == 0 and file is not None:
            file.touch()
        return str(error)
    return None


def test_a_rank_that_stays_away_ends_the_job(tmp_path):
    """It stays away until the other one has given up."""
    text, other = run_ranks(stay_away, 2, 1.5, tmp_path / "given up", timeout_s=120)
    assert text is not None
    assert "no action completed for 1.5 s (stall_timeout_s)" in text
    assert "rank 1 waits for nobody and does not come; it is in test_stall.py:" in text
    assert "stay_away" in text
    assert "0B0" in text
    assert "not in a step" in text
    assert other is not None and "stall_timeout_s" in other


def save_alone(file, what):
    """Rank 0 does alone what takes all ranks, and rank 1 trains on."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "stall_timeout_s": 1.5})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    train(model, torch.ones(4, 4))
    try:
        if smp.rank() == 0 and what == "save":
            smp.save_checkpoint(file, "alone", model=model)
        elif smp.rank() == 0:
            model.state_dict()
        train(model, torch.ones(4, 4))
    except (smp.PeerFailure, RankMismatch) as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("what", "name"), [("save", "smp.save_checkpoint"), ("state", "model.state_dict")]
)
def test_saving_on_one_rank_ends_the_job(tmp_path, what, name):
    for text in run_ranks(save_alone, 2, str(tmp_path), what, timeout_s=60):
        assert text is not None
        assert re.search(rf"pp_rank 0 called {re.escape(name)}\(\) at \S*test_stall\.py:\d+", text)
        assert "while rank 1 (pp_rank 1) called the step function mpxla.tests.test_stall" in text
        assert "stall_timeout_s" not in text, "no time has to pass for that"


def save_slowly(file):
    """One rank takes long to write, which is no stall."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "stall_timeout_s": 1.0})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    train(model, torch.ones(4, 4))
    original = save.save_object

    def slow(*args):
        if smp.rank() == 1:
            time.sleep(1.5)
        return original(*args)

    save.save_object = slow
    try:
        smp.save_checkpoint(file, "slow", model=model)
    finally:
        save.save_object = original
    smp.resume_from_checkpoint(file)


def test_a_slow_disk_is_waited_for(tmp_path):
    run_ranks(save_slowly, 2, str(tmp_path), timeout_s=60)
    assert (tmp_path / "newest").read_text() == "slow\n"


def test_a_rank_that_is_only_late_is_waited_for():
    assert run_ranks(stay_away, 2, 60.0, None, timeout_s=120) == [None, None]
