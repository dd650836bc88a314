"""Resuming exactly: random states, the partition, bytes that are read, sharded optimizers."""

import random

import numpy as np
import pytest
import torch

import mpxla as smp
from mpxla.checkpoint import load
from mpxla.checkpoint.shards import ShardReader
from mpxla.tests.checkpoint.worlds import Run, batch
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def draws():
    """Numbers of every generator on the host, and of the device's own."""
    from mpxla.session import current

    on_device = torch.rand(2, device=current().backend.device).cpu().tolist()
    return [random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item(), on_device]


def evaluate(model, ids, labels):
    return torch.nn.functional.cross_entropy(model(ids), labels)


def save_in_mid_run(path):
    run = Run(stages=2, dropout=0.5)
    random.seed(smp.rank())
    np.random.seed(smp.rank())
    np.random.randn()
    run.train(2)
    draws()
    run.save(path, "two")
    drawn = draws()
    ranks = run.model.partition_decision()
    return drawn, run.train(2), ranks


def keep_readers():
    """A list that every later reader of this process is added to."""
    readers = []

    class Reader(ShardReader):
        def __init__(self, *args):
            super().__init__(*args)
            readers.append(self)

    load.ShardReader = Reader
    return readers


def resume_with_another_step_first(path):
    random.seed(50)
    readers = keep_readers()
    run = Run(stages=2, dropout=0.5, seed=60)
    run.resume(path)
    drawn = draws()
    run.model.eval()
    smp.step(evaluate)(run.model, *batch(9))
    run.model.train()
    losses = run.train(2)
    state = run.optimizer.optimizer.state
    own = [t for p in run.model.local_parameters() for t in state[p].values()]
    whole = {id(t): t for t in run.model.state_dict().values()}  # tied weights are read once
    wanted = sum(t.nbytes for t in [*whole.values(), *own])
    return drawn, losses, run.model.partition_decision(), readers[0].num_bytes_read, wanted


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(tmp_path):
    """Dropout, other generators, and an evaluation before the first training step."""
    saved = run_ranks(save_in_mid_run, 2, str(tmp_path))
    resumed = run_ranks(resume_with_another_step_first, 2, str(tmp_path))
    for (drawn, losses, ranks), (*actual, num_bytes, wanted) in zip(saved, resumed, strict=True):
        assert actual == [drawn, losses, ranks]
        assert num_bytes == wanted, "the model, which is there as a whole, and its optimizer state"
    (number, *_), (other, *_) = saved[0][0], saved[1][0]
    assert number != other, "every rank has its own states"


# --- a sharded optimizer ------------------------------------------------------------------------


def save_shards(path):
    run = Run(stages=1, replicas=2, shard_optimizer_state=True)
    run.train(1)
    run.save(path, "shards")
    return run.train(2)


def resume_shards(path, replicas, sharded):
    readers = keep_readers()
    run = Run(stages=1, replicas=replicas, shard_optimizer_state=sharded, seed=33)
    run.resume(path)
    return run.train(2), readers[0].num_bytes_read


def test_sharded_state_resumes_under_any_sharding(tmp_path):
    losses = run_ranks(save_shards, 2, str(tmp_path))
    expected = torch.tensor(losses).mean(dim=0).tolist()
    counts = []
    for rank in (0, 1):
        parts = torch.load(tmp_path / "shards_partial" / f"optimizer_0_0_{rank}.pt")
        counts.append(sum(t.numel() for name, t in parts.items() if name.startswith("exp_avg/")))
    assert max(counts) - min(counts) <= 2, "each replica wrote its half"
    same = run_ranks(resume_shards, 2, str(tmp_path), 2, True)
    assert [r[0] for r in same] == losses, "bitwise"
    whole = run_ranks(resume_shards, 2, str(tmp_path), 2, False)
    assert [r[0] for r in whole] == losses, "bitwise: the updates are elementwise"
    assert same[0][1] < 0.7 * whole[0][1], "a replica reads its share of the state"
    ((alone, _),) = run_ranks(resume_shards, 1, str(tmp_path), 1, False)
    assert alone == pytest.approx(expected, rel=2e-5)
