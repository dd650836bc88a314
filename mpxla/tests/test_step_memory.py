"""What a step takes at its peak, and what it leaves, against arithmetic.

As in `test_sharded_memory`, bytes of the process are counted for two sizes of a model or of a
batch, and their difference is compared.
"""

import sys

import pytest
import torch

from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_sharded_memory import (
    NUM_BLOCKS,
    Model,
    Peak,
    block_bytes,
    held_and_peak,
    held_bytes,
)

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="asks the C library of Linux"),
]

WIDTHS = (128, 384)
WIDTH = 128
BATCHES = (64, 4096)
BACKENDS = ("pjrt", "torch_xla")
FLOAT_BYTES = 4
MODEL = NUM_BLOCKS * (block_bytes(WIDTHS[1]) - block_bytes(WIDTHS[0]))
LOGITS = (BATCHES[1] - BATCHES[0]) * WIDTH * FLOAT_BYTES


def on(backend):
    return {"timeout_s": 240.0, "env": {"MPXLA_DEVICE": backend}}


def grown(measure, sizes, *args):
    """Runs on every rank: what the larger size takes more, of each figure that is measured."""
    for size in sizes:  # programs, and what stays of any session, are there before the others
        measure(size, *args)
    small, large = (measure(size, *args) for size in sizes)
    return [b - a for a, b in zip(small, large, strict=True)]


def step_peak(width, config, num_calls):
    """(bytes after some steps, bytes at the peak of a step of several calls)."""
    import mpxla as smp

    smp.init(config)
    before = held_bytes()
    model = smp.DistributedModel(Model(width), bucket_cap_mb=2.5)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001))
    held, peak = held_and_peak(model, optimizer, width, num_calls)
    smp.shutdown()
    return held - before, peak - before


@pytest.mark.parametrize(
    ("config", "num_calls", "limit"),
    [
        pytest.param({"ddp": True}, 1, 3.3, id="replicas"),  # beside both, what is in buckets
        pytest.param({}, 2, 3.5, id="two calls"),  # beside both, the gradients of the second one
    ],
)
def test_gradients_exist_once_beside_their_sum(config, num_calls, limit):
    """A step of SGD: parameters and gradients, and once more the gradients."""
    world = 2 if config else 1
    for held, peak in run_ranks(grown, world, step_peak, WIDTHS, config, num_calls, **on("pjrt")):
        print(f"{held / MODEL:.2f} models held, {peak / MODEL:.2f} at the peak")
        assert held / MODEL == pytest.approx(2, abs=0.15)
        assert peak / MODEL < limit


def before_and_at_peak(prepare, change, finish):
    """(bytes before a change, bytes at its peak), in the third step."""
    from mpxla.session import current

    for _ in range(3):
        prepare()
        current().backend.wait()
        held = held_bytes()
        with Peak() as peak:
            change()
            current().backend.wait()
        finish()
    return held, peak.bytes


def changed_gradients(width, kind):
    """(bytes before clipping or unscaling, bytes at its peak) with masters."""
    import mpxla as smp

    smp.init({})
    before = held_bytes()
    model = smp.DistributedModel(Model(width).to(getattr(torch, kind)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001))
    scaler = smp.amp.GradScaler(init_scale=4.0, enabled=kind == "float16")
    batch = torch.randn(4, width, dtype=getattr(torch, kind))

    @smp.step
    def step(model, x):
        loss = model(x).float().square().mean()
        model.backward(scaler.scale(loss))
        return loss

    def prepare():
        optimizer.zero_grad()
        step(model, batch)

    def change():
        if scaler.is_enabled():
            scaler.unscale_(optimizer)
        else:
            smp.clip_grad_norm_(model.parameters(), 0.001)

    def finish():
        if scaler.is_enabled():
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    held, peak = before_and_at_peak(prepare, change, finish)
    smp.shutdown()
    return held - before, peak - before


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("bfloat16", 0.1), ("float16", 0.3)],  # whether each element is finite takes a byte
)
def test_clipped_and_unscaled_gradients_take_the_memory_of_the_old_ones(kind, limit):
    (found,) = run_ranks(grown, 1, changed_gradients, WIDTHS, kind, **on("pjrt"))
    held, peak = (value / MODEL for value in found)
    print(f"{held:.2f} models of float32 held, {peak:.2f} at the peak")
    assert held == pytest.approx(0.5 + 1 + 1, abs=0.15)  # parameters, masters, gradients
    assert peak < held + limit


def update_peak(width, kind):
    """(bytes before an update, bytes at its peak) of AdamW, in eight parts where there are some."""
    import mpxla as smp
    from mpxla.parallel.updates import parts as update_parts

    update_parts.PART_BYTES = 1 << 18
    smp.init({})
    before = held_bytes()
    model = smp.DistributedModel(Model(width).to(getattr(torch, kind)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.001))
    batch = torch.randn(4, width, dtype=getattr(torch, kind))

    @smp.step
    def step(model, x):
        loss = model(x).float().square().mean()
        model.backward(loss)
        return loss

    def prepare():
        optimizer.zero_grad()
        step(model, batch)

    held, peak = before_and_at_peak(prepare, optimizer.step, lambda: None)
    smp.shutdown()
    return held - before, peak - before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_an_update_needs_little_beside_parameters_and_state(backend, kind):
    """By donation, or in parts where torch_xla has no donation."""
    (found,) = run_ranks(grown, 1, update_peak, WIDTHS, kind, **on(backend))
    held, peak = (value / MODEL for value in found)
    print(f"{backend}: {held:.2f} models of float32 held, {peak:.2f} at the peak")
    results = 3 if kind == "float32" else 3.5
    assert peak < held + (0.3 if backend == "pjrt" else results * 2 / 8 + 0.3)


def losses_kept(batch, config, is_read):
    """(bytes of a loss that is kept, bytes of logits that are): without the model."""
    import mpxla as smp
    from mpxla.session import current

    smp.init({"microbatches": 2, **config})
    model = smp.DistributedModel(Model(WIDTH))
    x = torch.randn(batch, WIDTH)

    @smp.step
    def step(model, x):
        logits = model(x)
        loss = logits.square().mean()
        model.backward(loss)
        return loss, logits

    def kept(place):
        for _ in range(2):
            found = step(model, x)[place]
            if is_read:
                found.reduce_mean()
        current().backend.wait()
        return found, held_bytes()

    kept(0)
    step(model, x)
    current().backend.wait()
    before = held_bytes()
    loss, with_loss = kept(0)
    del loss
    logits, with_logits = kept(1)
    del logits
    smp.shutdown()
    return with_loss - before, with_logits - before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("degree", [1, 2])
def test_a_kept_loss_keeps_no_logits(backend, degree):
    config = {"pipeline_parallel_degree": degree}
    found = run_ranks(grown, degree, losses_kept, BATCHES, config, True, **on(backend))
    for with_loss, with_logits in found:
        print(f"{with_loss / LOGITS:.2f} logits with a loss, {with_logits / LOGITS:.2f} with them")
        assert with_loss / LOGITS < 0.3
        assert with_logits / LOGITS < 1.3


def growth_by_shapes(width):
    """(bytes of a plan for another batch size, where the step reads a teacher)."""
    import mpxla as smp
    from mpxla.session import current

    smp.init({})
    model = smp.DistributedModel(Model(width))
    teacher = Model(width).requires_grad_(False)

    @smp.step
    def step(model, x):
        loss = (model(x) - teacher(x)).square().mean()
        model.backward(loss)
        return loss

    def run(num_rows):
        model.zero_grad()
        step(model, torch.randn(num_rows, width))
        current().backend.wait()
        return held_bytes()

    run(4)
    first, *_, last = (run(num_rows) for num_rows in (8, 12, 16))
    smp.shutdown()
    return ((last - first) / 2,)


@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_share_what_steps_read_beside_models(backend):
    ((of_plan,),) = run_ranks(grown, 1, growth_by_shapes, WIDTHS, **on(backend))
    print(f"{of_plan / MODEL:.2f} teachers for each batch size")
    assert of_plan / MODEL < 0.3
