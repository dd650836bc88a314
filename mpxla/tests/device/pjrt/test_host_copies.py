"""What jax counts of its arrays while saved values are on the host."""

import gc

import jax
import torch

from mpxla.device.pjrt.backend import PjrtBackend
from mpxla.runtime.buffers import LiveValues
from mpxla.runtime.host_copies import HostCopies
from mpxla.schedule.action import parse_action


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_the_device_holds_less_while_values_are_on_the_host():
    backend, values = PjrtBackend("cpu"), LiveValues()
    copies = HostCopies(values, backend)
    empty = live_bytes()
    given = [torch.arange(1000.0), torch.ones(10, dtype=torch.bfloat16), torch.tensor([True])]
    saved = backend.put(given)
    values.save(0, 0, saved, [4000, 20, 1])
    del saved
    assert live_bytes() - empty == values.saved_bytes == 4021
    offload = parse_action("0OFFLOAD0")
    copies.offload(offload, [])
    copies.complete(offload)
    assert live_bytes() == empty and values.saved_bytes == 0
    copies.load(parse_action("0LOAD0"))
    found = backend.get(values.restore(0, 0))
    copies.close()
    assert live_bytes() - empty == values.saved_bytes == 4021
    for value, expected in zip(found, given, strict=True):
        assert value.dtype == expected.dtype and torch.equal(value, expected)
    values.release(0, 0)
    assert live_bytes() == empty and values.is_empty()
