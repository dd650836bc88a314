"""What must hold while training goes on: no compilation, bounded memory, nothing left behind."""

import gc
import time

import pytest
import torch
from torch.utils.weak import WeakIdKeyDictionary

import mpxla as smp
from mpxla.tests.backends import backend_here
from mpxla.tests.models import Gpt, classify, labelled, mlp, predict_tokens, tokens
from mpxla.tests.programs import texts_of_programs
from mpxla.tests.ranks.run import run_ranks, run_ranks_unpooled

pytestmark = pytest.mark.ranks


def begin(build, stages, microbatches, **config):
    smp.init({"pipeline_parallel_degree": stages, "microbatches": microbatches, **config})
    torch.manual_seed(0)
    return smp.DistributedModel(build())


class Compilations:
    """Programs compiled so far, as the backend counts them and by its library's own events."""

    def __init__(self):
        self._of_jax = 0
        if backend_here().name == "pjrt":
            import jax

            jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event, duration, **_):
        self._of_jax += event == "/jax/core/compile/backend_compile_duration"

    def __call__(self):
        return backend_here().num_compilations, self._by_the_library()

    def _by_the_library(self):
        if backend_here().name == "pjrt":
            return self._of_jax
        import torch_xla.debug.metrics as metrics

        return metrics.counter_value("UncachedCompile") or 0


# --- compilations -------------------------------------------------------------------------------


def compile_counts():
    """In a process of its own, so that nothing is compiled yet.

    Returns the compilations of each step call and each update of a session with 2 microbatches, and
    then of one with 6, and the programs that the engine asked for, with their texts.
    """
    kind, counts, asked = type(backend_here()), Compilations(), []
    original = kind.compile

    def compile_noting(backend, name, *args, **kwargs):
        if not name.startswith("stage "):
            return original(backend, name, *args, **kwargs)
        with texts_of_programs() as texts:
            program = original(backend, name, *args, **kwargs)
        asked.append((name, "\n".join(texts)))
        return program

    kind.compile = compile_noting
    seen = []
    for microbatches in (2, 6):
        model = begin(mlp, 2, microbatches, compile_cache="")  # programs of other tests are there
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        step = smp.step(classify)
        calls, updates = [], []
        for _ in range(5):
            optimizer.zero_grad()
            before = counts()
            output = step(model, labelled((12,), 4 * microbatches))
            calls.append(tuple(b - a for a, b in zip(before, counts(), strict=True)))
            output["loss"].reduce_mean().item()
            before = counts()
            optimizer.step()
            updates.append(counts()[0] - before[0])
        seen.append((calls, updates))
        smp.shutdown()
    return seen, asked


@pytest.fixture(scope="module")
def compiled():
    results = run_ranks_unpooled(compile_counts, 2, timeout_s=200)
    assert [result.exit_code for result in results] == [0, 0], results[0].stderr
    return [result.value for result in results]


def test_nothing_compiles_after_the_first_step(compiled):
    for seen, _ in compiled:
        for calls, updates in seen:
            assert calls[1:] == [(0, 0)] * 4
            assert updates[1:] == [0] * 4


def test_a_stage_is_two_programs(compiled):
    for rank, (_, asked) in enumerate(compiled):
        names = [name for name, _ in asked]
        assert names == [f"stage {rank} forward", f"stage {rank} backward"] * 2


def test_first_step_compiles_its_programs_and_at_most_two_small_ones(compiled):
    """The small ones sum tied gradients, put constants on the device or make zeros there."""
    for seen, _ in compiled:
        timed, counted = seen[0][0][0]
        assert timed == counted
        assert 2 <= timed <= 4


@pytest.mark.slow
def test_programs_do_not_depend_on_the_number_of_microbatches(compiled):
    """With microbatches of the same size, those of 2 serve for 6."""
    for _, asked in compiled:
        assert all(text for _, text in asked)
        assert asked[:2] == asked[2:]


@pytest.mark.torch_xla
def test_torch_xla_keeps_programs_for_the_next_session(compiled):
    for seen, _ in compiled:
        timed, _ = seen[1][0][0]
        assert timed <= 1
        assert seen[1][1] == [0] * 5


# --- live values --------------------------------------------------------------------------------


def peaks_of(pipeline, active):
    options = {} if active is None else {"active_microbatches": active}
    model = begin(mlp, 3, 4, pipeline=pipeline, **options)
    smp.step(classify)(model, labelled((12,), 8))
    run = model.last_run
    return (
        dict(run.values.peak_in_flight),
        run.values.is_empty(),
        run.num_tasks,
        len(run.accumulators),
    )


@pytest.mark.parametrize(
    ("pipeline", "active", "expected"),
    [
        ("interleaved", None, [3, 2, 1]),
        pytest.param("interleaved", 2, [2, 2, 1], marks=pytest.mark.slow),
        pytest.param("interleaved", 1, [1, 1, 1], marks=pytest.mark.slow),
        pytest.param("simple", None, [4, 4, 4], marks=pytest.mark.slow),
    ],
)
def test_saved_activations_are_those_that_the_schedule_promises(pipeline, active, expected):
    results = run_ranks(peaks_of, 3, pipeline, active, timeout_s=120)
    assert [peaks for peaks, _, _, _ in results] == [{s: n} for s, n in enumerate(expected)]
    assert all(is_empty for _, is_empty, _, _ in results)
    assert [num_tasks for _, _, num_tasks, _ in results] == [8] * 3
    assert [left for _, _, _, left in results] == [0] * 3


TENSORS = (torch.Tensor, torch.nn.Parameter)


def live_things():
    """All tensors of this process, and all arrays of jax."""
    arrays = []
    if backend_here().name == "pjrt":
        import jax

        arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    return [t for t in gc.get_objects() if type(t) in TENSORS] + arrays


def memory_of(thing):
    """Where a tensor or an array lies on the device, and its bytes; None if it does not."""
    if type(thing) not in TENSORS:
        return thing.unsafe_buffer_pointer(), thing.nbytes
    try:
        kind = thing.device.type
        is_message = thing.dtype is torch.uint8  # on the host, which may be the device
        if is_message or kind != backend_here().device.type:
            return None
        if kind == "xla":
            return id(thing), thing.nbytes
        storage = thing.untyped_storage()  # perhaps that of an array
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError as error:
        # The list of all objects does not keep a tensor alive that only C++ holds: another thread
        # (a transfer, say) can free it after the list was made. It has no memory any more.
        if "does not have" not in str(error):
            raise
        return None


def settled_bytes(earlier, others):
    """Bytes on the device, without what transfers still hold for a moment, and without `others`.

    Args:
        earlier: the numbers that were found after earlier steps.
        others: what tests before this one left in this process.
    """

    def count():
        gc.collect()
        found = [memory_of(thing) for thing in live_things() if thing not in others]
        return sum(dict(place for place in found if place is not None).values())

    smp.barrier()  # everything that was sent has arrived
    found = [count()]
    while found[-1] not in earlier[:1] and len(found) < (20 if earlier else 3):
        time.sleep(0.05)
        found.append(count())
    return min(found)


def device_bytes():
    """Bytes of all that a model has on the device, after a number of steps."""
    others = WeakIdKeyDictionary()
    for thing in live_things():
        others[thing] = None
    model = begin(Gpt, 2, 4)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    step = smp.step(predict_tokens)
    sizes = []
    for number in range(6):
        optimizer.zero_grad()
        step(model, tokens(8))
        optimizer.step()
        if number >= 2:
            sizes.append(settled_bytes(sizes, others))
    owned = sum(p.numel() * p.itemsize for p in model.local_parameters())
    total = sum(p.numel() * p.itemsize for p in model.parameters())
    return sizes, owned, total


def test_memory_does_not_grow_and_is_that_of_the_own_stage():
    results = run_ranks(device_bytes, 2, timeout_s=120)
    for sizes, owned, total in results:
        assert sizes == [sizes[0]] * 4
        assert owned < 0.75 * total
        assert sizes[-1] < 6 * owned  # weight, gradient, two moments; zeros; microbatches


# --- tied weights -------------------------------------------------------------------------------


def tied_copies():
    model = begin(Gpt, 2, 2)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    step = smp.step(predict_tokens)
    torch.manual_seed(1)
    copies = []
    for _ in range(3):
        optimizer.zero_grad()
        step(model, tokens(4))
        optimizer.step()
        copies.append(dict(model.local_named_parameters())["embed.weight"].detach().cpu().clone())
    return copies


def test_tied_copies_stay_equal_bit_for_bit():
    first, second = run_ranks(tied_copies, 2, timeout_s=120)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], first[1])
