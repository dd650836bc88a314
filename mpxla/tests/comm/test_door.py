"""Connections for messages: ranks alone get one, each for itself only."""

import contextlib
import os
import socket
import threading
from queue import SimpleQueue

import pytest

from mpxla.comm import door as door_module
from mpxla.comm import host
from mpxla.comm.door import Door, connect
from mpxla.errors import PeerFailure

pytestmark = pytest.mark.unit

KEY = b"known to all ranks"


@contextlib.contextmanager
def open_door():
    """The door of rank 1 of three, and a queue of what came in."""
    came = SimpleQueue()
    door = Door("127.0.0.1", 3, KEY, "where it is tried", lambda *given: came.put(given))
    try:
        yield door, came
    finally:
        door.close()


@pytest.fixture
def warnings(monkeypatch):
    found = SimpleQueue()
    monkeypatch.setattr(door_module, "warn_once", lambda _, text: found.put(text))
    return found


def test_a_rank_gets_a_connection_for_one_way():
    with open_door() as (door, came), connect(door.address, 2, 1, KEY, "") as connection:
        rank, home, other = came.get(timeout=30)
        connection.sendall(b"at once")
        with other:
            assert (rank, other.recv(100)) == (2, b"at once")
            assert home == f"pid {os.getpid()} on {socket.gethostname()}"
            assert other.gettimeout() is None and connection.gettimeout() is None


@pytest.mark.parametrize(
    ("rank", "key", "reason"),
    [
        (2, b"another", "it says that it is rank 2, and cannot prove it"),
        (3, KEY, "there is no such rank"),
    ],
)
def test_others_are_turned_away(warnings, rank, key, reason):
    with open_door() as (door, came):
        refused = r"did not take it for a rank of this job .*Look at the output of rank 1"
        with pytest.raises(PeerFailure, match=refused):
            connect(door.address, rank, 1, key, "")
        text = warnings.get(timeout=30)
        assert f"connected to port {door.address[1]} of this job, where it is tried, and" in text
        assert f"turned away: {reason}" in text
        assert came.empty()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"x" * 10_000])
def test_noise_is_turned_away_and_the_door_stays_open(warnings, noise):
    with open_door() as (door, came):
        with socket.create_connection(door.address, 30) as stranger:
            stranger.sendall(noise)
            assert "turned away" in warnings.get(timeout=30)
        with connect(door.address, 0, 1, KEY, ""):
            came.get(timeout=30)[2].close()


def test_who_says_nothing_keeps_nobody_waiting(monkeypatch, warnings):
    with open_door() as (door, came):
        silent = [socket.create_connection(door.address, 30) for _ in range(5)]
        with connect(door.address, 2, 1, KEY, ""):
            came.get(timeout=30)[2].close()
        for stranger in silent:
            stranger.close()
        assert "turned away" in warnings.get(timeout=30)


def test_only_so_many_may_be_silent(monkeypatch, warnings):
    monkeypatch.setattr(door_module, "_MAX_STRANGERS", 2)
    with open_door() as (door, _), contextlib.ExitStack() as open_:
        for _ in range(5):  # a place for each of three ranks, and two more
            stranger = open_.enter_context(socket.create_connection(door.address, 30))
            assert b"challenge" in stranger.recv(1000)
        refused = open_.enter_context(socket.create_connection(door.address, 30))
        assert refused.recv(1000) == b""


def test_a_closed_door_says_so_to_who_comes_later():
    with open_door() as (door, _):
        address = door.address
    with pytest.raises(
        PeerFailure, match=r"rank 0 could not reach rank 1 at 127.0.0.1 port.*Do so"
    ):
        connect(address, 0, 1, KEY, "Do so.")


def test_a_door_that_is_closed_leaves_no_thread():
    before = threading.active_count()
    with open_door():
        pass
    for thread in threading.enumerate():
        if thread.name == "mpxla-door":
            thread.join(30)
    assert threading.active_count() <= before


def test_keys_of_messages_are_those_of_one_rank():
    assert len({KEY, *(host._key_of(KEY, rank) for rank in range(3))}) == 4
