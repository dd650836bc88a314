import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpxla.comm.handle import Failure, FailureWatch, Handle
from mpxla.comm.whereabouts import Place
from mpxla.errors import PeerFailure

pytestmark = pytest.mark.unit


def later(seconds, function, *args):
    thread = threading.Timer(seconds, function, args)
    thread.start()
    return thread


def test_result_is_waited_for():
    handle = Handle(FailureWatch(0), "a message")
    assert not handle.done()
    later(0.1, handle.set_result, 5)
    assert handle.result() == 5
    assert handle.done()
    assert handle.result() == 5


def test_error_is_raised_as_often_as_asked():
    handle = Handle(FailureWatch(0), "a message")
    handle.set_error(KeyError("k"))
    assert handle.done()
    for _ in range(2):
        with pytest.raises(KeyError, match="k"):
            handle.result()


def test_timeout_names_the_wait_and_the_peers():
    handle = Handle(FailureWatch(3, 4), "a 'forward' message", peers=(1,))
    with pytest.raises(TimeoutError, match=r"rank 3 waited 0.1 s for a 'forward' message.*rank 1"):
        handle.result(timeout_s=0.1)
    handle.set_result(1)
    assert handle.result(timeout_s=0.1) == 1


def test_failure_ends_waits_at_once_but_not_what_is_done():
    watch = FailureWatch(0, 3)
    pending, done = Handle(watch, "a message from rank 2", peers=(2,)), Handle(watch, "other")
    done.set_result("here")
    later(0.1, watch.set_failure, Failure(1, "rank 1 raised ValueError: bad"))
    start = time.monotonic()
    with pytest.raises(
        PeerFailure,
        match=r"^rank 1 raised ValueError: bad \(rank 0 was waiting for a message from rank 2\)\. "
        "Look at the output of rank 1",
    ):
        pending.result()
    assert time.monotonic() - start < 20
    assert done.result() == "here"
    with pytest.raises(PeerFailure, match=r"rank 1 raised ValueError: bad\. Look"):
        watch.check()


def test_check_passes_while_all_live():
    FailureWatch(0).check()


def test_first_failure_stays():
    watch = FailureWatch(0, 3)
    watch.set_failure(Failure(2, "first"))
    watch.set_failure(Failure(1, "second"))
    watch.report("somewhere", ValueError("third"))
    assert watch.failure == Failure(2, "first")


def test_report_says_who_where_and_what():
    watch = FailureWatch(1, 2)
    watch.report("stage 1, microbatch 3", ValueError("bad"))
    assert watch.failure == Failure(1, "rank 1 raised ValueError in stage 1, microbatch 3: bad")
    other = FailureWatch(0)
    other.report("", ValueError("x" * 10000))
    assert other.failure.text.startswith("rank 0 raised ValueError: xxx")
    assert len(other.failure.text) < 5000
    assert "characters)" in other.failure.text


def test_callbacks_are_called_once_also_when_late():
    watch, calls = FailureWatch(0), []
    watch.on_failure(calls.append)
    failure = Failure(1, "text")
    watch.set_failure(failure)
    watch.set_failure(Failure(2, "other"))
    watch.on_failure(calls.append)
    assert calls == [failure, failure]


def test_leaving_of_a_needed_rank_ends_the_wait_after_settling():
    watch = FailureWatch(0, 3, settle_s=0.3)
    handle = Handle(watch, "a message from rank 2", peers=(2,))
    other = Handle(watch, "a message from rank 1", peers=(1,))
    later(0.1, watch.set_left, 2)
    start = time.monotonic()
    with pytest.raises(
        PeerFailure, match=r"rank 2 finished \(left\) while rank 0 waited for a message from rank 2"
    ):
        handle.result()
    assert 0.3 < time.monotonic() - start < 20
    assert watch.has_left(2)
    with pytest.raises(TimeoutError):
        other.result(timeout_s=0.1)


def test_message_may_arrive_after_its_sender_left():
    watch = FailureWatch(0, 2, settle_s=5)
    handle = Handle(watch, "a message", peers=(1,))
    watch.set_left(1)
    later(0.1, handle.set_result, "late")
    assert handle.result() == "late"


def test_broken_connection_is_explained_by_news_that_come_a_moment_later():
    watch = FailureWatch(0, 3)
    later(0.2, watch.set_failure, Failure(2, "rank 2 died"))
    error = watch.explain(RuntimeError("reset"), (1,), "a send to rank 1")
    assert str(error).startswith("rank 2 died (rank 0 was waiting for a send to rank 1)")


def test_broken_connection_to_a_rank_that_left():
    watch = FailureWatch(0, 3)
    watch.set_left(1)
    error = watch.explain(RuntimeError("reset"), (0, 1), "a send to rank 1")
    assert str(error).startswith("rank 1 finished (left) while rank 0 waited for a send to rank 1")
    assert watch.failure is None


def test_unexplained_broken_connection_is_reported():
    watch = FailureWatch(0, 2)
    error = watch.explain(RuntimeError("reset by peer"), (1,), "a send to rank 1")
    assert "rank 0 lost its connection to rank 1 during a send to rank 1" in str(error)
    assert "reset by peer" in str(error)
    assert watch.failure.text.startswith(
        "rank 0 raised PeerFailure in a send to rank 1: rank 0 lost"
    )


def test_long_wait_is_logged(monkeypatch):
    handle = Handle(FailureWatch(0, 3, stall_warning_s=0.05), "a message", peers=(2,))
    texts, waited_s = [], []

    def note(record):
        texts.append(record.getMessage())
        waited_s.append(time.monotonic() - start)
        if len(texts) == 4:
            handle.set_result(None)

    monkeypatch.setattr(logging.getLogger("mpxla"), "handle", note)
    start = time.monotonic()
    handle.result()
    assert len(texts) == 4
    for count, waited in enumerate(waited_s):
        assert waited >= 0.05 * 2**count, "after every doubling"
    assert "rank 0 has waited 0 s for a message; the ranks it needs (2) are alive" in texts[0]


def test_a_wait_is_told_by_the_users_words(monkeypatch):
    watch = FailureWatch(0, 2, stall_warning_s=0.01)
    watch.place = lambda: Place("smp.barrier", "train.py:30 main")
    watch.place_of = lambda rank: Place("the step function test", f"train.py:2{rank} evaluate")
    handle = Handle(watch, "all_gather of uint8[4096] with rank 1", peers=(1,))
    texts = []

    def note(record):
        texts.append(record.getMessage())
        watch.set_failure(Failure(1, "rank 1 raised ValueError: bad"))

    monkeypatch.setattr(logging.getLogger("mpxla"), "handle", note)
    with pytest.raises(PeerFailure) as raised:
        handle.result()
    assert texts == [
        "rank 0 has waited 0 s in smp.barrier at train.py:30 main for rank 1; the ranks it needs "
        "(1) are alive but have not come to it. Rank 1 is in the step function test at "
        "train.py:21 evaluate."
    ]
    assert "(rank 0 was waiting in smp.barrier at train.py:30 main for rank 1)" in str(raised.value)
    assert raised.value.raised_by == 1


def test_failure_is_noticed_when_the_owning_thread_meets_it():
    watch = FailureWatch(0, 2)
    watch.set_failure(Failure(1, "text"))
    with ThreadPoolExecutor(1) as pool, pytest.raises(PeerFailure, match="text"):
        pool.submit(watch.check).result()
    assert not watch.noticed.is_set()
    with pytest.raises(PeerFailure):
        watch.check()
    assert watch.noticed.is_set()


def test_error_set_by_another_thread_is_noticed_when_it_is_raised():
    watch = FailureWatch(0, 2)
    watch.set_failure(Failure(1, "text"))
    handle = Handle(watch, "a message")
    handle.set_error(PeerFailure("text"))
    assert not watch.noticed.is_set()
    with pytest.raises(PeerFailure):
        handle.result()
    assert watch.noticed.is_set()


def test_connection_that_this_rank_breaks_itself_is_no_failure():
    watch = FailureWatch(0, 2)
    watch.is_closing = True
    watch.changed = None  # it waits for no news
    error = watch.explain(RuntimeError("reset"), (1,), "a send to rank 1")
    assert str(error) == "rank 0 shut mpxla down during a send to rank 1."
    assert watch.failure is None
