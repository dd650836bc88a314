"""The end of all lifelines: a thread on rank 0 that hears who fails and tells everybody.

One line of JSON per message, over one TCP connection per rank (rank 0 has one to itself):

    from a rank:  report (text) | bye | beat (what it is doing)
    to a rank:    ready (all are connected) | failure (rank, text) | bye (rank)
                  pulse (what all are doing)

The kernel closes the connection of a process that dies, however it dies, so an end of file without
a bye is a death. Keepalive probes find hosts that vanish without a word. The first failure stays
and is repeated to ranks that connect later. Ranks tell regularly what they are doing, and `stall`
judges it.

This file knows no tensors, no torch and nothing of what the ranks do.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from queue import SimpleQueue
from typing import Any

from mpxla.comm.door import Door
from mpxla.comm.handle import Failure
from mpxla.comm.pulse import Absence, beat_interval_s, longest_silence_s
from mpxla.comm.stall import LEFT, explain_stall
from mpxla.log import warn_once

__all__ = ["LifelineServer", "decode", "encode", "set_keepalive"]

_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 3
_SEND_TIMEOUT_S = 1.0
_MAX_LINE_BYTES = 1 << 20
_NOTICEABLE_S = 5.0
"""A silence of so long is no coincidence, though perhaps no failure yet."""
_UNTOLD: dict[str, Any] = {**LEFT, "idle_s": 0.0, "now": "starting", "where": ""}
_MOST_ROWS = 64
"""In a larger world, rows are not handed on to all ranks."""


def encode(**message: Any) -> bytes:
    """Returns a message as it travels: one line of JSON."""
    return json.dumps(message).encode() + b"\n"


def decode(buffer: bytearray) -> list[dict[str, Any]]:
    """Takes the complete messages out of `buffer`; an incomplete last one stays.

    Raises:
        ValueError: A line is not a message.
    """
    messages = []
    while (end := buffer.find(b"\n")) >= 0:
        message = json.loads(buffer[:end])
        if not isinstance(message, dict):
            raise ValueError(f"not a lifeline message: {message!r}")
        messages.append(message)
        del buffer[: end + 1]
    if len(buffer) > _MAX_LINE_BYTES:
        raise ValueError(f"a lifeline message of more than {len(buffer)} bytes")
    return messages


def set_keepalive(connection: socket.socket) -> None:
    """Makes the kernel give up on a silent peer host after about half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    limit_ms = 1000 * (_KEEPALIVE_IDLE_S + _KEEPALIVE_INTERVAL_S * _KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


class _Member:
    """One connection, of a rank that has proved to be one."""

    def __init__(self, rank: int, home: str, connection: socket.socket) -> None:
        self.rank, self.home = rank, home
        self.connection = connection
        self.buffer = bytearray()
        self.said_bye = False
        self.row: dict[str, Any] = {}
        self.heard = time.monotonic()


class LifelineServer:
    """Listens from construction on, in a daemon thread."""

    def __init__(
        self, host: str, world_size: int, key: bytes, stall_timeout_s: float = float("inf")
    ) -> None:
        """Binds a free port of a local address; connections have to prove to know the key."""
        self._world_size = world_size
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._members: dict[_Member, None] = {}  # in the order of connecting
        self._failure: Failure | None = None
        self._greeted: set[int] = set()
        self._ended: set[int] = set()
        self._stop_at = float("inf")
        self.stall: Failure | None = None
        """The failure that this server has found itself, of ranks that do not end by themselves."""
        self._timeout_s = stall_timeout_s
        self._interval_s = beat_interval_s(stall_timeout_s)
        self._next_look = time.monotonic()
        self._absence = Absence()
        self._arrived: SimpleQueue[_Member] = SimpleQueue()
        self._door = Door(host, world_size, key, "its lifeline", self._greet)
        self.port = self._door.address[1]
        self._thread = threading.Thread(target=self._run, name="mpxla-lifeline-server", daemon=True)
        self._thread.start()

    def sockets(self) -> list[socket.socket]:
        """Returns the open sockets, for a forked child to close."""
        members = [member.connection for member in self._members]
        return [self._door.listener, self._wake_read, self._wake_write, *members]

    def stop(self, linger_s: float) -> None:
        """Ends the thread as soon as every rank has left, at the latest after `linger_s`."""
        self._stop_at = time.monotonic() + linger_s
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended before
            self._wake_write.send(b"x")

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._serve()
        except Exception as error:  # all ranks rely on this thread
            text = f"the lifeline server of rank 0 failed: {type(error).__name__}: {error}"
            self._fail(Failure(0, text))
        self._selector.close()
        self._door.close()
        for connection in self.sockets():
            connection.close()

    def _serve(self) -> None:
        """Takes in what has come, and judges when it is time."""
        is_watching = self._timeout_s != float("inf")
        until = min(self._stop_at, self._next_look if is_watching else float("inf"))
        left_s = max(until - time.monotonic(), 0.0)
        if self._stop_at <= time.monotonic():
            left_s = self._interval_s
        for key, _ in self._selector.select(left_s if left_s < 3600 else None):
            if key.fileobj is self._wake_read:
                self._wake_read.recv(64)
                while not self._arrived.empty():
                    self._admit(self._arrived.get())
            else:
                self._read(key.data)
        if is_watching and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._interval_s
            self._look()

    def _is_over(self) -> bool:
        if self._stop_at == float("inf"):
            return False
        has_everybody_left = len(self._ended) == self._world_size and not self._there()
        if self._failure is not None or has_everybody_left:
            return True
        # Who has fallen silent is waited for until that is a failure.
        return time.monotonic() >= self._stop_at and not self._silent(_NOTICEABLE_S)

    def _greet(self, rank: int, home: str, connection: socket.socket) -> None:
        """Called by threads of the door."""
        self._arrived.put(_Member(rank, home, connection))
        self._wake()

    def _admit(self, member: _Member) -> None:
        if member.rank in self._greeted:
            member.connection.close()
            warn_once(
                f"rank {member.rank} comes twice",
                f"somebody who runs as {member.home} connected to the lifeline of this job and was "
                f"turned away: rank {member.rank} is connected already.",
            )
            return
        member.connection.settimeout(_SEND_TIMEOUT_S)
        set_keepalive(member.connection)
        self._members[member] = None
        self._selector.register(member.connection, selectors.EVENT_READ, member)
        self._greeted.add(member.rank)
        if self._failure is not None:
            self._send(member, encode(type="failure", **self._failure._asdict()))
        if len(self._greeted) == self._world_size:
            self._tell_all(type="ready")

    def _read(self, member: _Member) -> None:
        try:
            data = member.connection.recv(65536)
        except OSError:  # reset
            data = b""
        try:
            member.buffer += data
            for message in decode(member.buffer):
                self._handle(member, message)
        except Exception as error:  # a rank that is out of order
            data = b""
            text = (
                f"rank {member.rank} sent a message on its lifeline that rank 0 cannot read "
                f"({type(error).__name__}: {error}). Install the same version of mpxla on every "
                f"host"
            )
            self._fail(Failure(member.rank, text))
        if not data:
            self._drop(member)

    def _handle(self, member: _Member, message: dict[str, Any]) -> None:
        member.heard = time.monotonic()
        if message["type"] == "report":
            self._fail(Failure(member.rank, str(message["text"])))
        elif message["type"] == "beat":
            member.row = message["row"]
        elif message["type"] == "bye":
            member.said_bye = True
            self._ended.add(member.rank)
            self._tell_all(type="bye", rank=member.rank)
        else:
            raise ValueError(f"an unknown message {message['type']!r}")

    def _look(self) -> None:
        """Fails for a rank that is silent or stalled, and tells the others what all are doing."""
        now = self._absence.look()
        rows, last = {rank: LEFT for rank in self._ended}, {}
        silent = self._silent(longest_silence_s(self._timeout_s))
        for member in self._there():
            row = {**_UNTOLD, **member.row}
            if member in silent:
                rows.pop(member.rank, None)
                last[member.rank] = {**row, "idle_s": now - member.heard}
            elif not member.said_bye:
                rows[member.rank] = row
        if self._failure is None and len(rows) + len(last) == self._world_size:
            found = explain_stall(rows, self._world_size, self._timeout_s, silent=last)
            if found is not None:
                self.stall = Failure(*found)
                self._fail(self.stall)
        told = encode(type="pulse", rows=rows if self._world_size <= _MOST_ROWS else {})
        for member in self._there():
            if member not in silent and now - member.heard < _NOTICEABLE_S:
                self._send(member, told)  # one that is stopped would not take it

    def _there(self) -> list[_Member]:
        """Ranks that are not done: who has said bye hangs up at once, and rank 0 after all."""
        return [m for m in self._members if m.rank != 0 or not m.said_bye]

    def _silent(self, for_s: float) -> list[_Member]:
        """Members of which nothing was heard for so long, although they should be."""
        if self._timeout_s == float("inf"):
            return []
        since = time.monotonic() - for_s
        return [m for m in self._there() if max(m.heard, self._absence.until) <= since]

    def _drop(self, member: _Member) -> None:
        if member not in self._members:
            return
        del self._members[member]
        self._selector.unregister(member.connection)
        member.connection.close()
        if member.said_bye:
            return
        self._ended.add(member.rank)
        self._fail(
            Failure(
                member.rank,
                f"rank {member.rank} ({member.home}) died: its process ended without a report, as "
                f"after a kill, a crash, running out of memory or os._exit",
            )
        )

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self._tell_all(type="failure", **failure._asdict())

    def _tell_all(self, **message: Any) -> None:
        for member in list(self._members):
            self._send(member, encode(**message))

    def _send(self, member: _Member, data: bytes) -> None:
        try:
            member.connection.sendall(data)
        except OSError:
            self._drop(member)
