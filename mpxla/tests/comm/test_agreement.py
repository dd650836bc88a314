"""What all ranks must have alike: all of them learn the difference, and the same text of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from mpxla.comm.agreement import agreed, check_agreement, share_error
from mpxla.comm.codec import DATA
from mpxla.comm.objects import Objects
from mpxla.errors import MpxlaError, PeerFailure, RankMismatch
from mpxla.tests.comm.threads import threads_world

pytestmark = pytest.mark.unit

GROUP = (0, 1, 2)


def on_all(function, *of_ranks):
    """What a function gives, or raises, on every rank of a world of threads."""

    def run(transport, own):
        try:
            return function(Objects(transport, DATA), own)
        except MpxlaError as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(of_ranks)) as pool:
        return list(pool.map(run, threads_world(len(of_ranks)), of_ranks))


def show(others, first, other):
    return f"{others} have {other}, not {first}"


def test_all_get_what_all_have():
    found = on_all(lambda objects, own: agreed(objects, GROUP, own, show), 7, 7, 7)
    assert found == [[7, 7, 7]] * 3


def test_all_raise_the_same_text():
    found = on_all(lambda objects, own: agreed(objects, GROUP, own, show), 7, 8, 9)
    assert found == ["RankMismatch: [1, 2] have 8, not 7"] * 3


def test_a_key_says_what_has_to_be_equal():
    def compare(objects, own):
        return agreed(objects, GROUP, own, show, lambda value: value % 10)

    assert on_all(compare, 7, 17, 27) == [[7, 17, 27]] * 3
    assert on_all(compare, 7, 17, 28) == ["RankMismatch: [2] have 28, not 7"] * 3


def test_one_rank_agrees_with_itself_and_talks_to_nobody():
    assert agreed(None, (3,), "own", show) == ["own"]


def test_the_first_line_that_differs_is_shown():
    def compare(objects, own):
        check_agreement(objects, GROUP, own, "have another model", "Do something.")

    assert on_all(compare, ["a", "b"], ["a", "b"], ["a", "b"]) == [None] * 3
    found = on_all(compare, ["a", "b"], ["a", "b"], ["a"])
    assert (
        found
        == [
            "RankMismatch: ranks [2] have another model than rank 0:\n"
            "  b on rank 0\n"
            "  nothing more on rank 2\n"
            "Do something."
        ]
        * 3
    )


def test_who_failed_raises_its_own_error():
    def share(objects, own):
        share_error(objects, GROUP, own, "a step")

    assert on_all(share, None, None, None) == [None] * 3
    first, own, last = on_all(share, None, RankMismatch("it is odd"), None)
    assert own == "RankMismatch: it is odd"
    text = "PeerFailure: rank 1 raised RankMismatch in a step: it is odd. Look at the output of"
    assert first.startswith(text) and last == first
    with pytest.raises(PeerFailure):
        share_error(None, (3,), PeerFailure("alone"), "a step")
