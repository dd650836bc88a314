"""What existing SMP scripts do to save; numbers of the list of client behaviours."""

import os

import pytest
import torch

import mpxla as smp
from mpxla.tests.checkpoint.worlds import Run, TiedNet
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def save_as_scripts_do(folder):
    """19: full and partial saves on the ranks with dp_rank 0; 20: without flags, and torch.save."""
    run = Run(stages=2)
    run.train(1)
    if smp.dp_rank() == 0:
        smp.save(run.model.state_dict(), f"{folder}/full.pt", partial=False)
        partial = {
            "model": run.model.local_state_dict(),
            "optimizer": run.optimizer.local_state_dict(),
            "scheduler": run.scheduler.state_dict(),
            "steps": 1,
        }
        smp.save(partial, f"{folder}/partial.pt", partial=True)
    if smp.rank() == 0:
        smp.save({"steps": 1}, f"{folder}/plain.pt")
    torch.save(run.model.state_dict(), f"{folder}/every{smp.rank()}.pt")
    smp.barrier()
    return run.train(2)


def resume_as_scripts_do(folder):
    run = Run(stages=2, seed=8)
    saved = smp.load(f"{folder}/partial.pt", partial=True)
    run.model.load_state_dict(saved["model"], same_partition_load=False)
    run.optimizer.load_state_dict(saved["optimizer"])
    run.scheduler.load_state_dict(saved["scheduler"])
    run.number = saved["steps"]
    losses = run.train(2)
    smp.shutdown()
    run = Run(stages=2, seed=8)
    run.model.load_state_dict(smp.load(f"{folder}/full.pt", partial=False))
    run.number = 1
    return losses, run.train(1)


@pytest.mark.slow  # compat/test_client_scripts.py has a shorter one by default
def test_client_behaviours_19_and_20(tmp_path):
    expected = run_ranks(save_as_scripts_do, 2, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [
        *("every0.pt", "every1.pt", "full.pt", "partial.pt_0", "partial.pt_1", "plain.pt_0"),
    ]
    plain = TiedNet()
    for name in ("full.pt", "every0.pt", "every1.pt"):
        plain.load_state_dict(torch.load(tmp_path / name))
    partial = torch.load(tmp_path / "partial.pt_1")
    assert "_smp_is_partial" in partial["model"]
    for losses, first in run_ranks(resume_as_scripts_do, 2, str(tmp_path)):
        assert losses == expected[0], "bitwise"
        assert first == expected[0][:1]
