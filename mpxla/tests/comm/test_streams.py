"""An outbox and an inbox over a connection, without processes."""

import contextlib
import socket
import threading
import time

import pytest
import torch

from mpxla.comm import streams
from mpxla.comm.handle import FailureWatch, Handle
from mpxla.comm.packing import copy_to_host
from mpxla.comm.streams import Inbox, Outbox, Posted
from mpxla.errors import PeerFailure, RankMismatch

pytestmark = pytest.mark.unit


class Late(torch.Tensor):
    """A tensor that is not computed."""


@contextlib.contextmanager
def ends(buffer_bytes=None, to_host=copy_to_host):
    """An outbox of rank 0 for rank 1, and the other end of its connection."""
    here, there = socket.socketpair()
    if buffer_bytes is not None:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    watch = FailureWatch(0, 2)

    def is_ready(tensor):
        return not isinstance(tensor, Late)

    outbox = Outbox(1, lambda: here, watch, to_host, is_ready)
    while outbox._is_busy:  # it connects
        time.sleep(0.001)
    try:
        yield outbox, there
    finally:
        outbox.interrupt()
        outbox.finish(is_orderly=False)
        outbox.thread.join(30)
        there.close()
        assert not outbox.thread.is_alive()


def receive(connection, specs_of_channels):
    """What an inbox makes of a connection."""
    watch = FailureWatch(1, 2)
    inbox = Inbox(0, watch)
    handles = []
    for channel, specs in specs_of_channels:
        handle = Handle(watch, f"a {channel} message", (0,))
        inbox.post(Posted(handle, specs), channel)
        handles.append(handle)
    threading.Thread(target=inbox.read, args=(connection,), daemon=True).start()
    return inbox, handles


def test_what_is_computed_leaves_at_once_and_in_the_callers_thread(monkeypatch):
    begun_in = []
    begin = Outbox._begin
    monkeypatch.setattr(
        Outbox,
        "_begin",
        lambda self, message: begun_in.append(threading.current_thread()) or begin(self, message),
    )
    value = torch.arange(5.0)
    with ends() as (outbox, there):
        assert outbox.put([value], "a").done()
        value.zero_()  # it has left
        _, (first,) = receive(there, [("a", [value])])
        assert torch.equal(first.result(30)[0], torch.arange(5.0))
    assert begun_in == [threading.current_thread()]


def test_order_stays_whoever_sends():
    """Messages that wait for their values, large ones and small ones, on one channel."""
    values = [
        torch.full((1 << 20,), 0.0).as_subclass(Late),
        torch.tensor([1.0]),
        torch.full((1 << 18,), 2.0),
        torch.tensor([3.0]),
    ]

    def to_host(tensor):
        if isinstance(tensor, Late):
            time.sleep(0.2)
        return tensor.as_subclass(torch.Tensor)

    with ends(to_host=to_host) as (outbox, there):
        deliveries = [outbox.put([value], "a") for value in values]
        _, handles = receive(there, [("a", [value]) for value in values])
        assert [handle.result(30)[0][0].item() for handle in handles] == [0.0, 1.0, 2.0, 3.0]
        for delivery in deliveries:
            delivery.result(30)


def test_nobody_waits_for_a_receiver_that_does_not_read():
    """The connection takes a part of what would leave at once; the thread sends the rest."""
    values = [torch.full((20_000,), float(i)) for i in range(5)]
    with ends(buffer_bytes=10_000) as (outbox, there):
        deliveries = [outbox.put([value], "a") for value in values]
        assert not any(delivery.done() for delivery in deliveries)
        _, handles = receive(there, [("a", [value]) for value in values])
        for value, handle in zip(values, handles, strict=True):
            assert torch.equal(handle.result(30)[0], value)
        for delivery in deliveries:
            delivery.result(30)


def test_several_tensors_are_one_message_and_keep_dtypes_and_shapes():
    values = [torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(True)]
    values.append(torch.empty(0, 4))
    with ends() as (outbox, there):
        outbox.put(values, "a")
        _, (handle,) = receive(there, [("a", values)])
        for value, found in zip(values, handle.result(30), strict=True):
            assert value.dtype == found.dtype and torch.equal(value, found)


def test_a_connection_that_ends_without_a_farewell_was_broken():
    with ends() as (outbox, there):
        outbox.put([torch.ones(1)], "a").result(30)
        inbox, (first, second) = receive(there, [("a", [torch.ones(1)]), ("a", [torch.ones(1)])])
        first.result(30)
        outbox.interrupt()
        with pytest.raises(PeerFailure, match="has closed its connection"):
            second.result(30)
        inbox.thread.join(30)


def test_a_farewell_ends_both_threads():
    with ends() as (outbox, there):
        inbox, (first,) = receive(there, [("a", [torch.ones(1)])])
        outbox.put([torch.ones(1)], "a")
        outbox.finish(is_orderly=True)
        first.result(30)
        assert outbox.flushed.wait(30)
        inbox.thread.join(30)
        assert not inbox.thread.is_alive() and inbox._over_error is None


def test_a_second_connection_of_a_rank_is_not_read():
    with ends() as (outbox, there):
        inbox, _ = receive(there, [])
        while inbox.thread is None:
            time.sleep(0.001)
        one, other = socket.socketpair()
        with one, other:
            inbox.read(other)  # returns at once
            assert one.recv(1) == b""
        outbox.put([torch.ones(1)], "a").result(30)
        handle = Handle(FailureWatch(1, 2), "a message", (0,))
        inbox.post(Posted(handle, [torch.ones(1)]), "a")
        assert handle.result(30)[0].item() == 1.0


def test_ranks_that_disagree_about_a_message_see_both_views():
    with ends() as (outbox, there):
        outbox.put([torch.ones(3)], "a")
        _, (handle,) = receive(there, [("a", [torch.ones(2, dtype=torch.int64)])])
        with pytest.raises(RankMismatch, match=r"expected int64\[2\] .* is float32\[3\]"):
            handle.result(30)


def test_a_message_that_cannot_be_computed_is_told_and_ends_the_stream():
    def to_host(tensor):
        raise RuntimeError("device lost")

    with ends(to_host=to_host) as (outbox, _):
        first = outbox.put([torch.ones(1)], "a")
        second = outbox.put([torch.ones(1)], "a")
        for handle in (first, second):
            with pytest.raises(RuntimeError, match="device lost"):
                handle.result(30)
        failure = outbox._watch.failure
        assert failure is not None and "computing a 'a' message: device lost" in failure.text


def test_large_messages_are_left_to_the_thread(monkeypatch):
    monkeypatch.setattr(streams, "_AT_ONCE_BYTES", 3)
    with ends() as (outbox, there):
        handle = outbox.put([torch.ones(1)], "a")
        _, (received,) = receive(there, [("a", [torch.ones(1)])])
        handle.result(30)
        assert received.result(30)[0].item() == 1.0
