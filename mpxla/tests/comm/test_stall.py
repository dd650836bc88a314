"""What is said when nothing moves: who waits for whom, who is silent, and when nothing is wrong."""

import threading
import time

import pytest

from mpxla.comm.handle import Handle
from mpxla.comm.stall import LEFT, Progress, explain_stall
from mpxla.errors import PeerFailure
from mpxla.tests.comm.test_lifeline import lifelines

pytestmark = pytest.mark.unit


def status(waits_for=(), idle_s=9.0, now="0F1", following="0B0", where="train.py:3 main"):
    return {
        "idle_s": idle_s,
        "now": now,
        "next": following,
        "waits_for": list(waits_for),
        "what": "a 'forward' message" if waits_for else "",
        "where": where,
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
    assert "rank 1 is silent: its process does not answer" in text
    assert "(silent: no answer)" in text


def test_a_rank_that_has_left_is_named():
    culprit, text = explain_stall({0: status([1]), 1: LEFT}, 2, 5.0)
    assert culprit == 1 and "has left" in text


def test_nothing_is_wrong_while_somebody_moves():
    assert explain_stall({0: status([1]), 1: status([0], idle_s=4.9)}, 2, 5.0) is None


def test_progress_describes_itself():
    progress = Progress()
    assert progress.status((), "")["now"] == "not in a step"
    progress.begin(["0F0", "0B0"], lambda action: f"<{action}>")
    progress.at(1)
    found = progress.status((3,), "something")
    assert (found["now"], found["next"]) == ("<0B0>", "end of the step")
    assert found["waits_for"] == [3] and found["idle_s"] < 60
    assert found["where"].startswith("test_stall.py:"), "the main thread is in this test"
    with progress.busy():
        progress.since -= 100
        assert progress.status((), "")["idle_s"] == 0
    progress.end()
    assert progress.status((), "")["now"] == "not in a step"


def wait_inside_a_step(line, progress, peer, failures):
    """What a rank's main thread does when a message does not come."""
    line._owner = threading.current_thread()
    progress.begin([f"{line.rank}F0"], str)
    with pytest.raises(PeerFailure) as error:
        Handle(line, f"a message from rank {peer}", (peer,)).result()
    failures[line.rank] = str(error.value)


def test_ranks_that_wait_for_each_other_end_with_the_table():
    progresses = [Progress(), Progress()]
    failures = {}
    with lifelines(2, stall_timeout_s=0.5) as lines:
        for line, progress in zip(lines, progresses, strict=True):
            line._progress = progress
        started = time.monotonic()
        threads = [
            threading.Thread(
                target=wait_inside_a_step, args=(lines[r], progresses[r], 1 - r, failures)
            )
            for r in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert 0.4 < time.monotonic() - started < 15
    assert failures.keys() == {0, 1}
    for text in failures.values():
        assert "wait for each other" in text and "0F0" in text and "1F0" in text


def test_a_slow_rank_that_moves_is_waited_for():
    progresses = [Progress(), Progress()]
    with lifelines(2, stall_timeout_s=1.5) as lines:
        for line, progress in zip(lines, progresses, strict=True):
            line._progress = progress
        progresses[1].begin(["1F0"] * 100, str)
        handle = Handle(lines[0], "a message from rank 1", (1,))

        def move():
            for index in range(36):
                time.sleep(0.05)
                progresses[1].at(index)
            handle.set_result("there")

        mover = threading.Thread(target=move)
        mover.start()
        lines[0]._owner = threading.current_thread()
        progresses[0].begin(["0F0"], str)
        assert handle.result() == "there"
        mover.join()
        assert lines[0].failure is None
