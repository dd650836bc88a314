"""What divided parameters and gradients take on a rank, against arithmetic.

XLA's CPU devices count nothing, but their memory is the process's: the C library counts every byte
that is allocated and not freed. A model is measured in two sizes, whose difference has nothing in
it of compiled programs.
"""

import ctypes
import gc
import sys
import threading

import pytest
import torch
from torch import nn

from mpxla.tests.ranks.run import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="asks the C library of Linux"),
]

NUM_BLOCKS = 6
FLOAT_BYTES = 4
BACKENDS = ("pjrt", "torch_xla")


class Model(nn.Module):
    """Products without biases: [B, width] to [B, width]."""

    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width, bias=False),
                nn.Tanh(),
                nn.Linear(4 * width, width, bias=False),
            )
            for _ in range(NUM_BLOCKS)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def block_bytes(width):
    return 8 * width * width * FLOAT_BYTES


class _Counts(ctypes.Structure):
    """`mallinfo2` of glibc 2.33."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes():
    """Bytes that the process has allocated and not freed."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Counts
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd


class Peak:
    """The most that is allocated inside a `with` block, as a thread sees it."""

    def __enter__(self):
        self.bytes, self._ends = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._ends.wait(0.0005):
            self.bytes = max(self.bytes, allocated_bytes())

    def __exit__(self, *_):
        self._ends.set()
        self._thread.join()


def train(config, width):
    """Runs on every rank: (bytes after some steps, bytes at the peak of another one)."""
    import mpxla as smp
    from mpxla.session import current

    smp.init({"ddp": True, "sdp_param_persistence_threshold": 1000, **config})
    gc.collect()
    before = allocated_bytes()
    model = smp.DistributedModel(Model(width))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    batch = torch.randn(4, width)

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def run():
        optimizer.zero_grad()
        step(model, batch)
        optimizer.step()
        current().backend.wait()

    for _ in range(3):
        run()
    gc.collect()
    held = allocated_bytes()
    with Peak() as peak:
        run()
    return held - before, peak.bytes - before


CONFIGS = {
    "parameters": ({"sharded_data_parallel_degree": 2}, 4 / 2),
    "gradients": ({"shard_gradients": True}, 1 + 4 / 2),
    "nothing": ({}, 4),
}
"""Keys, and bytes per byte of the model: parameter, gradient and two averages of AdamW. Beside
whole parameters an optimizer has pieces of them."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", CONFIGS)
def test_what_a_rank_holds(what, backend):
    config, factor = CONFIGS[what]
    sizes = (192, 512)
    narrow, wide = (
        run_ranks(train, 2, config, width, timeout_s=240.0, env={"MPXLA_DEVICE": backend})
        for width in sizes
    )
    grown = [block_bytes(width) for width in sizes]
    of_block = grown[1] - grown[0]
    for (held_narrow, peak_narrow), (held_wide, peak_wide) in zip(narrow, wide, strict=True):
        held, peak = held_wide - held_narrow, peak_wide - peak_narrow
        print(what, backend, held / of_block / NUM_BLOCKS, factor, (peak - held) / of_block)
        assert held == pytest.approx(factor * NUM_BLOCKS * of_block, rel=0.1)
