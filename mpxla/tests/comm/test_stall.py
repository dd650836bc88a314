"""What is said when nothing moves: who waits for whom, who is silent, and when nothing is wrong."""

import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from mpxla.comm import lifeline_server, pulse
from mpxla.comm.handle import Failure, FailureWatch, Handle, Wait
from mpxla.comm.stall import LEFT, Progress, explain_stall
from mpxla.comm.whereabouts import Whereabouts
from mpxla.errors import PeerFailure
from mpxla.tests.comm.test_lifeline import await_that, lifelines

pytestmark = pytest.mark.unit


def status(waits_for=(), idle_s=9.0, now="0F1", following="0B0", where="train.py:3 main", **other):
    return {
        "idle_s": idle_s,
        "is_waiting": bool(waits_for),
        "is_running": now != "not in a step",
        "now": now,
        "next": following,
        "waits_for": list(waits_for),
        "what": "a 'forward' message" if waits_for else "",
        "where": where,
        **other,
    }


def test_a_circle_is_named():
    statuses = {0: status([1]), 1: status([2], now="1F1"), 2: status([1], now="2B0")}
    culprit, text = explain_stall(statuses, 3, 5.0)
    assert culprit == 1
    assert "no action completed for 5 s (stall_timeout_s): rank 1 -> rank 2 -> rank 1 wait" in text
    assert [line.split("  ")[1:2] for line in text.splitlines()[2:5]] == [["0"], ["1"], ["2"]]
    assert "rank 2: a 'forward' message" in text and "2B0" in text


def test_a_rank_that_does_not_come_is_named_with_its_place():
    statuses = {0: status([1]), 1: status(now="not in a step", following="", where="data.py:7 f")}
    assert explain_stall(statuses, 2, 5.0)[0] == 1
    assert (
        "rank 1 waits for nobody and does not come; it is in data.py:7 f"
        in (explain_stall(statuses, 2, 5.0)[1])
    )


def test_a_silent_rank_is_named():
    culprit, text = explain_stall({0: status([2]), 2: status([1])}, 3, 5.0)
    assert culprit == 1
    assert "rank 1 is silent: its process gives no sign of life, so it is stopped" in text
    assert text.splitlines()[3].split() == ["1", "(silent)"]
    last = status(idle_s=7.0, where="data.py:7 f")
    _, text = explain_stall({0: status([2]), 2: status([1])}, 3, 5.0, silent={1: last})
    assert text.splitlines()[3].split() == "1 7 s (silent) last data.py:7 f".split()


def test_a_rank_that_has_left_is_named():
    culprit, text = explain_stall({0: status([1]), 1: LEFT}, 2, 5.0)
    assert culprit == 1 and "has left" in text


def test_nothing_is_wrong_while_somebody_moves():
    assert explain_stall({0: status([1]), 1: status([0], idle_s=4.9)}, 2, 5.0) is None


def test_ranks_that_have_called_different_things_are_told_which():
    """By the user's words: nobody has called an all_gather of bytes."""
    evaluates = status(
        [1],
        now="the step function test: capture",
        call="the step function test",
        where="t.py:23 evaluate",
        what="all_gather of uint8[4096] with rank 1",
    )
    waits = {"call": "smp.barrier", "where": "t.py:30 main", "what": "barrier with rank 0"}
    _, text = explain_stall({0: evaluates, 1: status([0], now="smp.barrier", **waits)}, 2, 5.0)
    assert (
        "rank 0 -> rank 1 -> rank 0 wait for each other: rank 0 is in the step function test at "
        "t.py:23 evaluate, rank 1 is in smp.barrier at t.py:30 main. Make the same calls on all of "
        "these ranks, in the same order\n"
    ) in text
    assert "uint8" not in text and "barrier with" not in text


def test_only_those_that_are_waited_for_excuse_a_wait():
    """Ranks 0 and 1 wait for each other, and rank 2 evaluates."""
    elsewhere = status(idle_s=0.0, now="not in a step")
    culprit, text = explain_stall({0: status([1]), 1: status([0]), 2: elsewhere}, 3, 5.0)
    assert culprit == 0 and "rank 0 -> rank 1 -> rank 0 wait for each other" in text
    assert explain_stall({0: status([1]), 1: status([2]), 2: elsewhere}, 3, 5.0) is None


def test_nobody_waits_for_a_rank_that_sleeps():
    asleep = status(now="not in a step")
    assert explain_stall({0: asleep, 1: status(idle_s=0.0)}, 2, 5.0) is None
    assert explain_stall({0: asleep, 1: asleep}, 2, 5.0) is None


def test_a_program_on_the_device_that_does_not_end_is_a_stall():
    """Its collectives wait inside, where nobody sees for whom."""
    stuck = status(where="loss.item()")
    assert explain_stall({0: stuck, 1: status(idle_s=1.0)}, 2, 5.0) is None
    assert "rank 0 waits for nobody" in explain_stall({0: stuck, 1: stuck}, 2, 5.0)[1]


def test_the_rank_that_is_missing_is_named_not_those_that_have_come():
    """Ranks 0 and 1 are at a barrier with rank 2, which waits for rank 0 in a step."""
    barrier = [status([*{0, 1, 2} - {rank}], what=f"barrier with {rank}") for rank in range(3)]
    culprit, text = explain_stall({0: barrier[0], 1: barrier[1], 2: status([0])}, 3, 5.0)
    assert "rank 0 -> rank 2 -> rank 0 wait for each other" in text
    elsewhere = status(now="not in a step", where="data.py:7 f")
    culprit, text = explain_stall({0: barrier[0], 1: barrier[1], 2: elsewhere}, 3, 5.0)
    assert culprit == 2 and "rank 2 waits for nobody and does not come" in text


def test_progress_describes_itself():
    progress = Progress()
    nothing = ((), "", None, 0.0)
    assert progress.status(*nothing)["now"] == "not in a step"
    progress.begin(["0F0", "0B0"], lambda action: f"<{action}>")
    progress.at(1)
    found = progress.status((3,), "something", time.monotonic() - 7, time.monotonic())
    assert (found["now"], found["next"]) == ("<0B0>", "end of the step")
    assert found["waits_for"] == [3] and found["is_waiting"] and 7 <= found["idle_s"] < 60
    assert found["where"].startswith("test_stall.py:"), "the main thread is in this test"
    progress.since -= 100
    assert progress.status(*nothing)["idle_s"] >= 100
    assert progress.status((), "", None, time.monotonic())["idle_s"] < 60, "the process computed"
    with progress.busy("compilation"):
        assert progress.status(*nothing)["idle_s"] < 60
    progress.end()
    assert progress.status(*nothing)["now"] == "not in a step"
    with progress.busy("compilation"):
        assert progress.status(*nothing)["now"] == "compilation"


def wait_inside_a_step(line, peer, failures):
    """What a rank's main thread does when a message does not come."""
    line._owner = threading.current_thread()
    line._progress.begin([f"{line.rank}F0"], str)
    with pytest.raises(PeerFailure) as error:
        Handle(line, f"a message from rank {peer}", (peer,)).result()
    failures[line.rank] = str(error.value)


@contextmanager
def watched(world_size, stall_timeout_s, **options):
    """Lifelines of ranks that each tell of themselves."""
    progresses = iter([Progress() for _ in range(world_size)])
    with lifelines(world_size, stall_timeout_s=stall_timeout_s, **options) as lines:
        for line in lines:
            line._progress = line._pulse._progress = next(progresses)
        try:
            yield lines
        finally:
            for line in lines:
                line.noticed.set()


def test_ranks_that_wait_for_each_other_end_with_the_table():
    failures = {}
    with watched(2, 0.5) as lines:
        threads = [
            threading.Thread(target=wait_inside_a_step, args=(lines[r], 1 - r, failures))
            for r in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures.keys() == {0, 1}
    for text in failures.values():
        assert "wait for each other" in text and "0F0" in text and "1F0" in text


def test_a_slow_rank_that_moves_is_waited_for():
    with watched(2, 1.5) as lines:
        progress = lines[1]._progress
        progress.begin(["1F0"] * 100, str)
        handle = Handle(lines[0], "a message from rank 1", (1,))

        def move():
            for index in range(36):
                time.sleep(0.05)
                progress.at(index)
            handle.set_result("there")

        mover = threading.Thread(target=move)
        mover.start()
        lines[0]._owner = threading.current_thread()
        lines[0]._progress.begin(["0F0"], str)
        assert handle.result() == "there"
        mover.join()
        assert lines[0].failure is None


def test_a_wait_with_pauses_is_one_wait():
    """So do replicas look around while a reduction does not complete."""
    with watched(2, 1.0) as lines:
        lines[0]._owner = threading.current_thread()
        lines[1]._progress.since -= 1000  # it sleeps
        lines[1]._pulse._vitals.sample = lambda: False
        lines[1]._pulse._moved -= 1000
        lines[1]._pulse._absence.until -= 1000
        handle = Handle(lines[0], "a reduction", (1,))
        with pytest.raises(PeerFailure, match="rank 1 waits for nobody and does not come"):
            for _ in range(600):
                with suppress(TimeoutError):
                    handle.result(timeout_s=0.1)


def test_the_wait_of_a_thread_is_that_of_the_thread_that_joins_it():
    watch = FailureWatch(0, 2)
    watch.background = lambda: Wait((1,), "a checkpoint", 0.0)
    assert watch.current_wait() is None
    with watch.joining():
        assert watch.current_wait() == ((1,), "a checkpoint", 0.0)
    assert watch.current_wait() is None


@pytest.mark.parametrize(
    "silent", [1, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 2))]
)
def test_a_rank_that_gives_no_sign_of_life_ends_the_job_wherever_the_others_are(
    silent, monkeypatch
):
    """As after SIGSTOP: its connections stay open."""
    monkeypatch.setattr(pulse, "_LEAST_SILENCE_S", 1.0)
    with watched(3, 1.0) as lines:
        lines[1]._progress.is_running = silent == 0
        if silent == 0:
            told = [line._pulse for line in lines[1:]]
            await_that(lambda: all(p.rows.get(1, LEFT)["is_running"] for p in told))
            lines[0]._server._look = lambda: None
        lines[silent]._pulse.stop()
        others = [line for line in lines if line.rank != silent]
        await_that(lambda: all(line.failure for line in others), timeout_s=60)
        for line in others:
            assert line.failure.rank == silent
            assert f"rank {silent} is silent: its process gives no sign" in line.failure.text
            assert "(silent)" in line.failure.text
            has_rows = "end of the step" in line.failure.text
            assert silent != 0 or has_rows, "the table shows the others"


@pytest.mark.slow
def test_nobody_is_silent_after_the_whole_machine_was_stopped(monkeypatch):
    monkeypatch.setattr(pulse, "_LEAST_SILENCE_S", 1.0)
    with watched(2, 3.0) as lines:
        for absence in (lines[0]._server._absence, lines[0]._pulse._absence):
            absence._seen -= 100
        for member in lines[0]._server._members:
            member.heard -= 100
        lines[0]._pulse._heard -= 100
        time.sleep(2.0)
        assert [line.failure for line in lines] == [None, None]


@pytest.mark.slow
def test_leaving_waits_for_a_rank_that_fell_silent(monkeypatch):
    monkeypatch.setattr(pulse, "_LEAST_SILENCE_S", 1.0)
    monkeypatch.setattr(lifeline_server, "_NOTICEABLE_S", 0.3)
    with watched(3, 2.0) as lines:
        lines[1]._pulse.stop()
        lines[2].close()
        with pytest.raises(PeerFailure, match="rank 1 is silent"):
            lines[0].close(linger_s=0.5)


def test_nobody_leaves_unheard_by_a_rank_0_that_is_stopped(monkeypatch):
    monkeypatch.setattr(pulse, "_LEAST_SILENCE_S", 1.0)
    with watched(2, 1.0) as lines:
        stopped = threading.Event()

        def do_nothing():
            stopped.set()
            time.sleep(0.1)

        lines[0]._server._serve = do_nothing
        assert stopped.wait(60)
        with pytest.raises(PeerFailure, match="rank 0 is silent"):
            lines[1].close()


def test_who_leaves_after_a_silence_that_nothing_was_raised_for_fails():
    with watched(2, 1000.0) as lines:
        lines[1]._fail_alone(Failure(0, "rank 0 is silent"))
        with pytest.raises(PeerFailure, match="rank 0 is silent"):
            lines[1].close()
    with watched(2, 1000.0) as lines:
        lines[1]._fail_alone(Failure(0, "rank 0 is silent"))
        lines[1].noticed.set()
        lines[1].close()


BAD_MESSAGES = [b"no json\n", b"[1]\n", b"{}\n", b'{"type": "bye"}\n', b'{"type": "other"}\n']


@pytest.mark.parametrize("bad", BAD_MESSAGES)
def test_a_message_that_a_rank_cannot_read_is_a_failure_of_the_job(bad):
    with lifelines(2) as lines:
        server = lines[0]._server
        member = next(m for m in server._members if m.rank == 1)
        member.connection.sendall(bad)
        await_that(lambda: all(line.failure for line in lines))
        for line in lines:
            assert "rank 1 cannot read what rank 0 says on its lifeline" in line.failure.text
            assert "Install the same version of mpxla" in line.failure.text


@pytest.mark.parametrize("bad", [b"no json\n", b"[1]\n", b"{}\n", b'{"type": "other"}\n'])
def test_a_message_that_rank_0_cannot_read_is_a_failure_of_the_job(bad):
    with lifelines(2) as lines:
        lines[1]._connection.sendall(bad)
        await_that(lambda: all(line.failure for line in lines))
        for line in lines:
            assert line.failure.rank == 1
            assert "rank 1 sent a message on its lifeline that rank 0 cannot" in line.failure.text


def test_a_fault_of_the_server_is_a_failure_of_the_job():
    with watched(2, 1.0) as lines:

        def fail():
            raise KeyError("anything")

        lines[0]._server._look = fail
        await_that(lambda: all(line.failure for line in lines))
        assert "the lifeline server of rank 0 failed: KeyError: 'anything'" in lines[1].failure.text


def test_a_fault_of_the_pulse_is_a_failure_of_the_job():
    with watched(2, 1.0) as lines:
        lines[1]._pulse._current_wait = None
        await_that(lambda: all(line.failure for line in lines))
        assert "rank 1 cannot give signs of life: TypeError" in lines[0].failure.text


def wait_in_a_place(event, ready):
    ready.set()
    event.wait()


def test_the_place_of_a_thread_is_the_users_line():
    event, ready = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_in_a_place, args=(event, ready))
    whereabouts = Whereabouts(thread)
    assert whereabouts.find() == ("", ""), "it has not begun"
    thread.start()
    ready.wait()
    call, line = whereabouts.find()
    assert re.fullmatch(r"test_stall\.py:\d+ wait_in_a_place", line) and not call
    event.set()
    thread.join()


class Droppable:
    """Tells which thread has dropped it, as torch's tensors must not be by another one."""

    dropped_by = ()

    def __del__(self):
        type(self).dropped_by += (threading.current_thread(),)


def hold_and_drop():
    held = Droppable()
    return sum(range(200)) + (held is None)


def test_who_looks_for_a_thread_holds_none_of_its_variables():
    whereabouts, over = Whereabouts(threading.current_thread()), threading.Event()

    def look():
        while not over.is_set():
            whereabouts.find()

    looking = threading.Thread(target=look)
    looking.start()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        hold_and_drop()
    over.set()
    looking.join()
    assert set(Droppable.dropped_by) == {threading.current_thread()}


THREADS_THAT_COME_AND_GO = """
import ctypes, threading, time
from mpxla.comm.whereabouts import Whereabouts

whereabouts, end = Whereabouts(threading.current_thread()), time.monotonic() + 3.0

def look():
    while time.monotonic() < end:
        assert whereabouts.find().line

looking = threading.Thread(target=look)
looking.start()
Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
library, visit = ctypes.CDLL(None), Function(lambda _: None)
library.pthread_create.argtypes = (ctypes.c_void_p, ctypes.c_void_p, Function, ctypes.c_void_p)
library.pthread_join.argtypes = (ctypes.c_ulong, ctypes.c_void_p)
while time.monotonic() < end:
    threads = [ctypes.c_ulong() for _ in range(8)]
    for thread in threads:
        library.pthread_create(ctypes.byref(thread), None, visit, None)
    for thread in threads:
        library.pthread_join(thread, None)
looking.join()
print("still there")
"""


@pytest.mark.slow
def test_a_place_is_found_while_threads_of_libraries_enter_python():
    command = [sys.executable, "-c", THREADS_THAT_COME_AND_GO]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "still there\n", (done.returncode, done.stderr[-2000:])
