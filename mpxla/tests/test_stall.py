"""A step that one rank does not come to ends on all ranks with the table of what they do."""

import re
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.checkpoint import save
from mpxla.errors import RankMismatch
from mpxla.tests.ranks.run import run_ranks

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


def work_alone(file, kind):
    """Rank 1 takes long for something that rank 0 waits for."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "stall_timeout_s": STALL_S})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    train(model, torch.ones(4, 4))
    long = WORKS[kind] if smp.rank() == 1 else lambda _: None
    original = save.save_object

    def save_long(*args):
        long(file / "scratch")
        return original(*args)

    try:
        if "disk" in kind:
            save.save_object = save_long
            is_late = kind == "a stuck disk in the background"
            smp.save_checkpoint(file, "long", model=model, asynchronous=is_late)
            if is_late:
                smp.save_checkpoint(file, "longer", model=model)
        else:
            long(file / "scratch")
            smp.barrier()
    except smp.PeerFailure as error:
        (file / "given up").touch()
        return str(error)
    finally:
        save.save_object = original


def until_late():
    """Turns for clearly longer than the timeout."""
    end = time.monotonic() + 2.5 * STALL_S
    while time.monotonic() < end:
        yield


def compute(file):
    for _ in until_late():
        sum(range(1000))


def write(file):
    for _ in until_late():
        file.write_bytes(bytes(1_000_000))
        time.sleep(0.05)


def have_it_done(file):
    """As `aws s3 cp` would: by a process that computes."""
    text = f"import time; e = time.monotonic() + {2.5 * STALL_S}\nwhile time.monotonic() < e: pass"
    subprocess.run([sys.executable, "-c", text], check=True)


def hang(file):
    """As on a disk, lock or socket that does not answer, until the other rank has given up."""
    while not (file.parent / "given up").exists():
        time.sleep(0.05)


STALL_S = 2.0
WORKS = {
    "an evaluation": compute,
    "a download": write,
    "a child process": have_it_done,
    "a slow disk": write,
    "a hanging loader": hang,
    "a stuck disk": hang,
    "a stuck disk in the background": hang,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["an evaluation", "a slow disk", "a download", "a child process"])
def test_what_makes_progress_is_waited_for(tmp_path, kind):
    assert run_ranks(work_alone, 2, tmp_path, kind, timeout_s=120) == [None, None]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("a stuck disk in the background", "rank 1: its part of a checkpoint"),
        pytest.param("a stuck disk", "smp.save_checkpoint", marks=pytest.mark.slow),
        pytest.param(
            "a hanging loader", "in smp.barrier at test_stall.py:", marks=pytest.mark.slow
        ),
    ],
)
def test_what_makes_no_progress_ends_the_job(tmp_path, kind, what):
    for text in run_ranks(work_alone, 2, tmp_path, kind, timeout_s=120):
        assert "no action completed for 2 s (stall_timeout_s)" in text
        assert "rank 1 waits for nobody and does not come; it is in test_stall.py:" in text
        assert "where it neither computes nor moves files" in text
        assert what in text


@pytest.mark.slow
def test_a_rank_that_is_only_late_is_waited_for():
    assert run_ranks(stay_away, 2, 60.0, None, timeout_s=120) == [None, None]
