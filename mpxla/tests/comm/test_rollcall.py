"""Who is there is told before anything else: missing ranks and different versions have names."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from mpxla.comm import rollcall
from mpxla.comm.rollcall import call_roll
from mpxla.errors import PeerFailure, RankMismatch

pytestmark = pytest.mark.unit


def together(store, ranks, world_size, timeout_s=60.0, version=lambda rank: "1.0"):
    """What became of the roll call on some ranks: the error or None."""

    def one(rank):
        try:
            call_roll(store, rank, world_size, version(rank), timeout_s)
        except (PeerFailure, RankMismatch) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.mark.parametrize("world_size", [2, 3, 70])
def test_all_come(world_size):
    assert together(dist.HashStore(), range(world_size), world_size) == [None] * world_size


def test_missing_ranks_are_named_and_those_that_are_there():
    store = dist.HashStore()
    for error in together(store, [0, 2], 5, timeout_s=0.3):
        assert isinstance(error, PeerFailure)
        text = str(error)
        assert "for rank 1, 3, 4 to call smp.init; rank 0, 2 of 5 came (rank 0: pid " in text
        assert "waited 0.3 s (init_timeout_s)" in text
        assert "Look at the output of rank 1, 3, 4" in text


def test_a_rank_that_comes_too_late_does_not_wait():
    store = dist.HashStore()
    together(store, [0, 2], 4, timeout_s=0.1)
    (error,) = together(store, [1], 4, timeout_s=1000.0)
    assert "rank 1 came too late: rank " in str(error)
    assert "for rank 1, 3 to call smp.init" in str(error)


def test_many_missing_ranks_are_counted():
    (error,) = together(dist.HashStore(), [0], 100, timeout_s=0.1)
    assert "15, 16 and 83 more to call smp.init; rank 0 of 100 came" in str(error)


def test_waiting_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(rollcall, "_WARN_AFTER_S", 0.05)
    store = dist.HashStore()
    late = threading.Timer(0.5, lambda: together(store, [1], 2))
    late.start()
    monkeypatch.setattr(rollcall.get_logger(), "propagate", True)
    with caplog.at_level("WARNING", logger=rollcall.get_logger().name):
        assert together(store, [0], 2) == [None]
    late.join()
    assert "waiting for rank 1 to call smp.init" in caplog.text


def test_different_versions_are_refused_on_all_ranks():
    versions = ["1.0", "1.1", "1.0"]
    for error in together(dist.HashStore(), range(3), 3, version=versions.__getitem__):
        assert isinstance(error, RankMismatch)
        assert "different versions of mpxla: 1.0 on rank 0, 2, 1.1 on rank 1" in str(error)


def test_what_a_future_version_adds_is_no_reason_to_fail():
    """It is refused for its version, not for what else it says of itself."""
    store = dist.HashStore()
    store.set("mpxla_roll/1", json.dumps(["2.0", "pid 1 on here", "more"]))
    (error,) = together(store, [0], 2)
    assert "1.0 on rank 0, 2.0 on rank 1" in str(error)
