"""Resuming exactly: random states, the partition, bytes that are read, sharded optimizers."""

import random

import numpy as np
import pytest
import torch

import mpxla as smp
from mpxla.checkpoint import load
from mpxla.parallel.optimizer import DistributedOptimizer
from mpxla.parallel.state_dicts import StatePiece
from mpxla.session import current
from mpxla.testing import run_ranks
from mpxla.tests.checkpoint.worlds import Run, batch

pytestmark = pytest.mark.ranks


def draws():
    """Numbers of every generator on the host, and of the device's own."""
    import torch_xla.core.xla_model as xm

    on_device = torch.rand(2, device=xm.xla_device()).cpu().tolist()
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


def resume_with_another_step_first(path):
    random.seed(50)
    readers = []

    class Reader(load.ShardReader):
        def __init__(self, *args):
            super().__init__(*args)
            readers.append(self)

    original, load.ShardReader = load.ShardReader, Reader
    try:
        run = Run(stages=2, dropout=0.5, seed=60)
        run.resume(path)
    finally:
        load.ShardReader = original
    drawn = draws()
    run.model.eval()
    smp.step(evaluate)(run.model, *batch(9))
    run.model.train()
    losses = run.train(2)
    state = run.optimizer.optimizer.state
    tensors = [t for p in run.model.local_parameters() for t in (p, *state[p].values())]
    persistent = [b for n, b in run.model.local_named_buffers() if n != "scratch"]
    held = sum(t.nbytes for t in [*tensors, *persistent])
    return drawn, losses, run.model.partition_decision(), readers[0].num_bytes_read, held


def test_a_resumed_run_is_the_same_run(tmp_path):
    """Dropout, other generators, and an evaluation before the first training step."""
    saved = run_ranks(save_in_mid_run, 2, str(tmp_path))
    resumed = run_ranks(resume_with_another_step_first, 2, str(tmp_path))
    for (drawn, losses, ranks), (*actual, num_bytes, held) in zip(saved, resumed, strict=True):
        assert actual == [drawn, losses, ranks]
        assert num_bytes == held, "each rank reads what it holds and nothing else"
    (number, *_), (other, *_) = saved[0][0], saved[1][0]
    assert number != other, "every rank has its own states"


# --- a sharded optimizer ------------------------------------------------------------------------


class HalvedOptimizer(DistributedOptimizer):
    """Shows the seam: pretends that each of two replicas holds half of every state tensor."""

    def _half(self, count):
        return slice(0, count // 2) if smp.rdp_rank() == 0 else slice(count // 2, count)

    def state_pieces(self):
        for piece in super().state_pieces():
            if piece.key == "step":
                yield piece
                continue
            flat, half = piece.value.reshape(-1), self._half(piece.value.numel())
            shape = tuple(piece.value.shape)
            yield StatePiece(piece.name, piece.key, flat[half], shape, half.start)

    def load_saved_state(self, saved):
        super().load_saved_state(saved)
        self.halves = {}
        for name, parameter in current_parameters():
            half = self._half(parameter.numel())
            part = saved.flat(name, "exp_avg", half.start, half.stop - half.start)
            whole = self.optimizer.state[parameter]["exp_avg"].cpu().reshape(-1)
            self.halves[name] = torch.equal(part, whole[half])


def current_parameters():
    return list(current().model.local_named_parameters())


def save_halves(path):
    run = Run(stages=1, replicas=2)
    run.train(1)
    halved = HalvedOptimizer.__new__(HalvedOptimizer)
    halved.__dict__.update(run.optimizer.__dict__)
    smp.save_checkpoint(path, "halves", model=run.model, optimizer=halved)
    return run.train(2)


def resume_halves(path):
    run = Run(stages=1)
    halved = HalvedOptimizer.__new__(HalvedOptimizer)
    halved.__dict__.update(run.optimizer.__dict__)
    run.model._optimizers[:] = [halved]
    run.resume(path)
    run.number = 1
    return halved.halves, run.train(2)


def test_parts_of_a_sharded_optimizer_are_put_together(tmp_path):
    expected = torch.tensor(run_ranks(save_halves, 2, str(tmp_path))).mean(dim=0).tolist()
    for rank in (0, 1):
        parts = torch.load(tmp_path / "halves_partial" / f"optimizer_0_0_{rank}.pt")
        halves = [t for name, t in parts.items() if name.startswith("exp_avg/first.weight[")]
        assert [t.numel() for t in halves] == [16 * 1024 // 2]
    ((halves, losses),) = run_ranks(resume_halves, 1, str(tmp_path))
    assert all(halves.values()) and len(halves) == 7
    assert losses == pytest.approx(expected, rel=2e-5)
