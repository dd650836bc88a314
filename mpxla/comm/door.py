"""Connections between the processes of a job: each listens, and whoever sends to it connects.

A connection carries messages one way, from the end that connected. Both ends prove that they know
the key of the session (`handshake`), and so that the right rank is at the other end; whoever cannot
is sent away.

This file knows sockets and threads; it must not know what is sent.
"""

import contextlib
import hashlib
import hmac
import os
import socket
import threading
from collections.abc import Callable

from mpxla.comm.addresses import listen
from mpxla.comm.handshake import Stranger, introduce, welcome
from mpxla.errors import PeerFailure
from mpxla.log import warn_once

__all__ = ["Door", "connect"]

_CONNECT_TIMEOUT_S = 300.0
_GREETING_TIMEOUT_S = 30.0
_MAX_STRANGERS = 64
"""How many callers may be without a proof at a time, besides the ranks."""


class Door:
    """Where a rank takes connections of the others, in a daemon thread.

    Each connection gets a thread, which calls `on_connection` with a rank and the connection, and
    ends when that returns.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        host: str,
        key: bytes,
        on_connection: Callable[[int, socket.socket], None],
    ) -> None:
        self._world_size = world_size
        self._key = _key_of(key, rank)
        self._places = threading.BoundedSemaphore(world_size + _MAX_STRANGERS)
        self._listener = listen(host, backlog=max(128, world_size))
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        # Threads alone hold `on_connection`: who opens a door is gone with its last user then.
        threading.Thread(
            target=self._listen, args=(on_connection,), name="mpxla-door", daemon=True
        ).start()

    def close(self) -> None:
        """Takes no more connections."""
        with contextlib.suppress(OSError):  # `close` alone would leave `accept` waiting
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self, on_connection: Callable[[int, socket.socket], None]) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except ConnectionAbortedError:  # the caller hung up before it was accepted
                continue
            except OSError:  # closed
                return
            if self._places.acquire(blocking=False):
                given = connection, on_connection
                threading.Thread(target=self._greet, args=given, daemon=True).start()
            else:
                connection.close()

    def _greet(
        self, connection: socket.socket, on_connection: Callable[[int, socket.socket], None]
    ) -> None:
        try:
            connection.settimeout(_GREETING_TIMEOUT_S)
            rank = welcome(connection, self._key, self._world_size)
            connection.settimeout(None)
        except (Stranger, OSError) as error:
            connection.close()
            warn_once(
                f"stranger at the door: {error}",
                f"somebody connected to port {self.address[1]} of this job, where ranks send "
                f"messages, and was turned away: {error}. If it was no rank of yours, see "
                f"docs/security.md.",
            )
            return
        finally:
            self._places.release()
        _set_options(connection)
        threading.current_thread().name = f"mpxla-recv-{rank}"
        on_connection(rank, connection)


def connect(address: tuple[str, int], rank: int, dst: int, key: bytes) -> socket.socket:
    """Opens the connection for messages from one rank to another.

    Raises:
        PeerFailure: It cannot be reached, or somebody else answers.
    """
    try:
        connection = socket.create_connection(address, _CONNECT_TIMEOUT_S)
    except OSError as error:
        raise PeerFailure(
            f"rank {rank} could not reach rank {dst} at {address[0]} port {address[1]}: {error}. "
            f"Allow TCP connections between the hosts of all ranks, and look at the output of rank "
            f"{dst}."
        ) from error
    try:
        introduce(connection, _key_of(key, dst), rank, f"pid {os.getpid()}", f"rank {dst}")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    _set_options(connection)
    return connection


def _key_of(key: bytes, dst: int) -> bytes:
    """What proves to belong to the messages to one rank, and to nothing else in the job."""
    return hmac.digest(key, f"messages to rank {dst}".encode(), hashlib.sha256)


def _set_options(connection: socket.socket) -> None:
    # Small messages leave at once. A host that vanishes without a word is the lifeline's concern.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
