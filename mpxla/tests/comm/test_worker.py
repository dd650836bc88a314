"""A thread that makes calls in order."""

import threading
import weakref
from functools import partial

import pytest

from mpxla.comm.worker import Worker

pytestmark = pytest.mark.unit


class Value:
    """Something that can be referred to weakly."""


def test_calls_are_made_in_order_until_the_end():
    worker, made = Worker("mpxla-test"), []
    assert worker.thread is None
    for number in range(100):
        worker.put(partial(made.append, number))
    worker.finish()
    worker.thread.join(10)
    assert not worker.thread.is_alive() and made == list(range(100))


def test_a_thread_that_waits_keeps_nothing_of_its_last_call():
    worker, gone = Worker("mpxla-test"), threading.Event()
    value = Value()
    reference = weakref.ref(value, lambda _: gone.set())
    worker.put(partial(id, value))
    del value
    assert gone.wait(10) and reference() is None and worker.thread.is_alive()
    worker.finish()
    worker.thread.join(10)
