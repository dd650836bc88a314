"""Copies of saved values to the host and back: what is freed when, and that values are the same."""

import threading
import weakref

import pytest
import torch

from mpxla.device.eager import EagerBackend
from mpxla.runtime.buffers import LiveValues
from mpxla.runtime.host_copies import HostCopies
from mpxla.schedule.action import parse_action

pytestmark = pytest.mark.unit
OFFLOAD, LOAD = parse_action("0OFFLOAD0"), parse_action("0LOAD0")


class Slow(EagerBackend):
    """Copies only when it is told to."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def view(self, buffer):
        assert self.go.wait(60)
        return super().view(buffer)


@pytest.fixture
def values():
    return LiveValues()


@pytest.fixture
def copies(values):
    found = HostCopies(values, Slow())
    yield found
    found._backend.go.set()
    found.close()


def saved_for_a_backward(values):
    """A weight, an input of the step, and two values of the microbatch, one of them twice."""
    weight, given = torch.ones(8), torch.arange(3.0)
    own, other = torch.arange(4.0), torch.tensor([True, False])
    values.save(0, 0, [weight, own, given, other, own], [0, 16, 12, 2, 16])
    return given, [weakref.ref(own), weakref.ref(other)]


def test_the_device_lets_go_of_what_was_copied_and_gets_the_same_back(values, copies):
    given, own = saved_for_a_backward(values)
    assert values.saved_bytes == 16 + 12 + 2
    copies.offload(OFFLOAD, [given])
    assert all(reference() is not None for reference in own), "the copy runs beside programs"
    assert values.saved_bytes == 30 and values.host_bytes == 0
    copies._backend.go.set()
    copies.complete(OFFLOAD)
    assert all(reference() is None for reference in own), "nobody holds the device's memory"
    assert (values.saved_bytes, values.host_bytes) == (12, 18), "the input is there anyway"
    copies.load(LOAD)
    assert values.saved_bytes == values.peak_saved_bytes == 30
    weight, first, same_input, second, again = values.restore(0, 0)
    assert values.host_bytes == 0 and values.peak_host_bytes == 18
    assert torch.equal(weight, torch.ones(8)) and same_input is given
    assert torch.equal(first, torch.arange(4.0)) and again is first
    assert torch.equal(second, torch.tensor([True, False]))
    values.release(0, 0)
    assert values.saved_bytes == 0 and values.is_empty()


def test_what_a_second_part_keeps_is_counted_once(values, copies):
    given, _ = saved_for_a_backward(values)
    copies._backend.go.set()
    copies.offload(OFFLOAD, [given])
    copies.complete(OFFLOAD)
    copies.load(LOAD)
    _, first, *_ = values.restore(0, 0)
    values.save(0, 0, [first], [16])
    assert values.saved_bytes == 16 and values.peak_saved_bytes == 30
    values.restore(0, 0)
    values.release(0, 0)
    assert values.saved_bytes == 0 and values.is_empty()


def test_an_error_of_the_device_is_raised_where_the_copy_is_needed(values, copies, monkeypatch):
    given, _ = saved_for_a_backward(values)

    def fail(buffer):
        raise RuntimeError("the program failed")

    monkeypatch.setattr(copies._backend, "view", fail)
    copies.offload(OFFLOAD, [given])
    with pytest.raises(RuntimeError, match="the program failed"):
        copies.complete(OFFLOAD)


def test_the_trace_hears_of_every_copy(values):
    noted = []
    copies = HostCopies(values, EagerBackend(), lambda *what: noted.append(what))
    given, _ = saved_for_a_backward(values)
    copies.offload(OFFLOAD, [given])
    copies.complete(OFFLOAD)
    copies.load(LOAD)
    copies.close()
    assert [action for action, _, _ in noted] == [OFFLOAD, LOAD]
    assert all(begin <= end for _, begin, end in noted)
