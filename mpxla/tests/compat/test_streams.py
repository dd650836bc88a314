"""Streams, events and ranges of `torch.cuda`, by code that the launcher runs."""

import time

import pytest
import torch

from mpxla.stage.program import compile_function
from mpxla.stage.spec import TensorSpec
from mpxla.tests.backends import backend_here
from mpxla.tests.compat.launching import inside, refusal

pytestmark = pytest.mark.ranks


def start_work():
    """Gives the device work. Returns a function that says whether it is not done yet."""
    backend = backend_here()
    if backend.name == "torch_xla":
        import torch_xla

        x = torch.ones(200, 200).cuda()
        product = x @ x
        return lambda: torch_xla._XLAC._check_tensor_need_materialization([product])[0]

    def sort(x):
        for _ in range(4):
            x = x.sin().sort(descending=True).values
        return [x]

    # Tensors are computed at once, programs of steps are not: this one takes half a second.
    x = torch.rand(1024, 1024)
    program = compile_function(backend, "sort", sort, [TensorSpec.of(x)])
    (result,) = program(backend.put([x]))
    return lambda: not result.is_ready()


def use_events():
    cuda = torch.cuda
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    time.sleep(0.05)
    is_pending = start_work()
    assert is_pending(), "otherwise nothing is tested"
    end.record(cuda.current_stream())
    assert not is_pending(), "recorded after the work before it"
    assert 50 <= start.elapsed_time(end) < 20_000
    assert end.elapsed_time(start) == -start.elapsed_time(end)
    end.synchronize(), end.wait()
    assert end.query()
    untimed = cuda.Event()
    untimed.record()
    return [
        refusal(lambda: start.elapsed_time(untimed)),
        refusal(lambda: start.elapsed_time(cuda.Event(enable_timing=True))),
    ]


def test_events_take_the_time_of_the_work_between_them():
    for text in inside(use_events):
        assert "test_streams.py:" in text and "start.elapsed_time(" in text
        assert "needs two recorded events that were made with enable_timing=True" in text


def prefetch():
    """As loaders do that copy the next batch on a stream of their own."""
    from torch.cuda.streams import Event, Stream

    cuda = torch.cuda
    assert (Event, Stream) == (cuda.Event, cuda.Stream)
    side = Stream(device=cuda.current_device(), priority=-1)
    batches, sums = [torch.full((3,), float(n)) for n in range(3)], []
    for batch in batches:
        with cuda.stream(side):
            moved = batch.cuda(non_blocking=True) * 2
        cuda.current_stream().wait_stream(side)
        cuda.default_stream(0).wait_event(side.record_event())
        moved.record_stream(cuda.current_stream())
        sums.append(moved.sum())
    is_pending = start_work()
    assert is_pending(), "otherwise nothing is tested"
    cuda.current_stream().synchronize()
    assert not is_pending()
    cuda.set_stream(side)
    assert side.query() and side.priority == -1
    return [total.item() for total in sums]


def test_streams_are_the_order_of_the_program():
    assert inside(prefetch) == [0.0, 6.0, 12.0]


def mark_ranges():
    import torch.cuda.nvtx as nvtx
    from torch.cuda.nvtx import range_pop, range_push

    range_push("outer"), range_pop()
    nvtx.mark("here"), nvtx.range_end(nvtx.range_start("on the host"))

    @nvtx.range("a {}", 1)
    def double(x):
        return 2 * x

    with nvtx.range("block"):
        assert double(2) == 4
    return [
        refusal(lambda: nvtx._device_range_start("x")),
        refusal(lambda: torch.cuda.ExternalStream(0)),
    ]


def test_ranges_have_no_effect():
    on_device, external = inside(mark_ranges)
    assert "torch.cuda.nvtx._device_range_start cannot be mapped" in on_device
    assert "it wraps a stream of CUDA's runtime" in external
