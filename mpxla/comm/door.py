"""Connections between the processes of a job: one listens, and the others connect to it.

Both ends prove that they know a key (`handshake`), and so that the right rank is at the other end;
whoever cannot is sent away.

This file knows sockets and threads; it must not know what is sent.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from mpxla.comm.addresses import listen
from mpxla.comm.handshake import Stranger, introduce, welcome
from mpxla.errors import PeerFailure
from mpxla.log import warn_once

__all__ = ["Door", "connect"]

OnConnection = Callable[[int, str, socket.socket], None]

_CONNECT_TIMEOUT_S = 300.0
_GREETING_TIMEOUT_S = 30.0
_MAX_STRANGERS = 64
"""How many callers may be without a proof at a time, besides the ranks."""


class Door:
    """Where a rank takes connections of the others, in a daemon thread.

    Each connection gets a thread, which calls `on_connection` with a rank, where that runs, and the
    connection, and ends when that returns. The purpose, in words, is for who is turned away.
    """

    def __init__(
        self,
        host: str,
        world_size: int,
        key: bytes,
        purpose: str,
        on_connection: OnConnection,
    ) -> None:
        self._world_size = world_size
        self._key = key
        self._purpose = purpose
        self._places = threading.BoundedSemaphore(world_size + _MAX_STRANGERS)
        self.listener = listen(host, backlog=max(128, world_size))
        self.address: tuple[str, int] = (host, self.listener.getsockname()[1])
        # Threads alone hold `on_connection`: who opens a door is gone with its last user then.
        threading.Thread(
            target=self._listen, args=(on_connection,), name="mpxla-door", daemon=True
        ).start()

    def close(self) -> None:
        """Takes no more connections."""
        with contextlib.suppress(OSError):  # `close` alone would leave `accept` waiting
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _listen(self, on_connection: OnConnection) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except ConnectionAbortedError:  # the caller hung up before it was accepted
                continue
            except OSError:  # closed
                return
            if self._places.acquire(blocking=False):
                given = connection, on_connection
                threading.Thread(target=self._greet, args=given, daemon=True).start()
            else:
                connection.close()

    def _greet(self, connection: socket.socket, on_connection: OnConnection) -> None:
        try:
            connection.settimeout(_GREETING_TIMEOUT_S)
            rank, home = welcome(connection, self._key, self._world_size)
            connection.settimeout(None)
        except (Stranger, OSError) as error:
            connection.close()
            warn_once(
                f"stranger at the door: {error}",
                f"somebody connected to port {self.address[1]} of this job, {self._purpose}, and "
                f"was turned away: {error}. If it was no rank of yours, see docs/security.md.",
            )
            return
        finally:
            self._places.release()
        _set_options(connection)
        on_connection(rank, home, connection)


def connect(
    address: tuple[str, int],
    rank: int,
    dst: int,
    key: bytes,
    advice: str,
    timeout_s: float = _CONNECT_TIMEOUT_S,
) -> socket.socket:
    """Opens a connection of one rank to the door of another.

    Raises:
        PeerFailure: It cannot be reached, or somebody else answers; the former with the advice.
    """
    try:
        connection = socket.create_connection(address, timeout_s)
    except OSError as error:
        raise PeerFailure(
            f"rank {rank} could not reach rank {dst} at {address[0]} port {address[1]}: {error}. "
            f"{advice}"
        ) from error
    home = f"pid {os.getpid()} on {socket.gethostname()}"
    try:
        introduce(connection, key, rank, home, f"rank {dst}")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    _set_options(connection)
    return connection


def _set_options(connection: socket.socket) -> None:
    # Small messages leave at once. A host that vanishes without a word is the lifeline's concern.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
