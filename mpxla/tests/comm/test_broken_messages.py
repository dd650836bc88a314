"""Any error in a message or a thread that carries it fails the job with a text; nobody hangs."""

import re
import time

import pytest
import torch

import mpxla as smp
from mpxla.comm import streams
from mpxla.comm.handle import FailureWatch
from mpxla.comm.host import _Collectives
from mpxla.errors import PeerFailure
from mpxla.session import current
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


def other_magic(patch):
    patch(streams, "_MAGIC", b"MPX0")


def other_number(patch):
    write = streams._Envelope.write
    patch(streams._Envelope, "write", lambda self: write(self._replace(number=7)))


def negative_size(patch):
    write = streams._Envelope.write
    patch(streams._Envelope, "write", lambda self: write(self._replace(num_bytes=-5)))


def endless_size(patch):
    write = streams._Envelope.write
    patch(streams._Envelope, "write", lambda self: write(self._replace(num_bytes=1 << 60)))


def fewer_bytes(patch):
    """Its specs promise more than comes."""
    pack = streams.pack
    patch(streams, "pack", lambda tensors: pack(tensors)[:4])


def cannot_be_sent(patch):
    def write(self):
        raise TypeError("made up")

    patch(streams._Envelope, "write", write)


def cannot_be_read(patch):
    """On both ranks, and only rank 0 reads."""

    def read(data):
        raise KeyError("made up")

    patch(streams._Envelope, "read", read)


FAULTS = {
    other_magic: "message 0 of rank 1 cannot be read: it begins with b'MPX0'",
    other_number: "message 0 of rank 1 cannot be read: it has the number 7",
    negative_size: "cannot be read: it begins with b'MPX1' and announces -5 bytes",
    endless_size: "there is no memory for 1152921504606846976 bytes",
    fewer_bytes: "rank 0 cannot unpack a 'test' message from rank 1: 4 bytes for float32",
    cannot_be_sent: "rank 1 raised TypeError in the delivery of a 'test' message to rank 0: made",
    cannot_be_read: "message 0 of rank 1 cannot be read: 'made up'",
}


def send_with_a_fault(fault, does_wait):
    """Errors of both ranks: rank 1 sends, and rank 0 waits for that, or is elsewhere."""
    smp.init({"pipeline_parallel_degree": 2})
    transport, undo = current().transport, []

    def patch(owner, name, value):
        undo.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    try:
        smp.barrier()  # rank 0 has left `init`
        if smp.rank() == 1 or fault is cannot_be_read:
            fault(patch)
        if smp.rank() == 1:
            transport.send([torch.zeros(1000)], 0, "test")
        else:
            handle = transport.recv([torch.zeros(1000)], 1, "test")
            if does_wait:
                handle.result()
        smp.recv_from(1 - smp.rank())  # which nobody sends
    except Exception as error:
        return type(error), str(error)
    finally:
        for owner, name, value in undo:
            setattr(owner, name, value)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_message_fails_the_job(fault):
    check(run_ranks(send_with_a_fault, 2, fault, True), FAULTS[fault])


def test_a_broken_message_fails_the_job_wherever_the_receiver_waits():
    check(run_ranks(send_with_a_fault, 2, other_magic, False), FAULTS[other_magic])


def leave_while_the_error_is_reported():
    """Rank 0 has its error before rank 1 can hear of it, and ends at once."""
    report = FailureWatch.report

    def report_late(watch, where, error):
        time.sleep(0.5)
        report(watch, where, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FailureWatch, "report", report_late)
        outcome = send_with_a_fault(fewer_bytes, True)
        smp.shutdown()
    return outcome


def test_who_leaves_with_an_error_has_told_the_others():
    check(run_ranks(leave_while_the_error_is_reported, 2), FAULTS[fewer_bytes])


def check(errors, text):
    for _, error in errors:
        assert re.search(text, error), error
    assert PeerFailure in {kind for kind, _ in errors}, "the other rank was told"


def gather_with_a_fault():
    smp.init({"pipeline_parallel_degree": 2})
    smp.barrier()
    group = tuple(range(2))

    def fail(*_):
        raise TypeError("made up")

    def submit(collectives, job):
        job.run = fail
        original(collectives, job)

    original = _Collectives.submit
    if smp.rank() == 1:
        _Collectives.submit = submit
    try:
        handles = [current().transport.barrier(group) for _ in range(2)]
        for handle in handles:
            handle.result()
    except Exception as error:
        return type(error), str(error)
    finally:
        _Collectives.submit = original


def test_a_collective_that_fails_in_any_way_fails_the_job():
    (kind, text), (_, own) = run_ranks(gather_with_a_fault, 2)
    assert kind is PeerFailure and "made up" in own
    assert "rank 1 raised TypeError in barrier with rank 0: made up" in text
