"""The end of all lifelines: a thread on rank 0 that hears who fails and tells everybody.

One line of JSON per message, over one TCP connection per rank (rank 0 has one to itself):

    from a rank:  hello (rank, where it runs, proof) | report (text) | bye
                  stall (timeout) | status (what it is doing)
    to a rank:    challenge | welcome (proof): see `handshake`
                  ready (all said hello) | failure (rank, text) | bye (rank) | describe

The kernel closes the connection of a process that dies, however it dies, so an end of file without
a bye is a death. Keepalive probes find hosts that vanish without a word. The first failure stays
and is repeated to ranks that connect later. A rank that finds that nothing moves has all ranks
describe what they are doing, and `stall` judges their answers.

This file knows no tensors, no torch and nothing of what the ranks do.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from mpxla.comm.handle import Failure
from mpxla.comm.handshake import MAX_HELLO_BYTES, Stranger, answer_hello, new_nonce
from mpxla.comm.stall import LEFT, explain_stall
from mpxla.log import warn_once

__all__ = ["LifelineServer", "decode", "encode", "set_keepalive"]

_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 3
_SEND_TIMEOUT_S = 1.0
_MAX_LINE_BYTES = 1 << 20
_ANSWER_S = 3.0
_MAX_STRANGERS = 64


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
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    limit_ms = 1000 * (_KEEPALIVE_IDLE_S + _KEEPALIVE_INTERVAL_S * _KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _Member:
    """One accepted connection; `rank` is None until it has said hello."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = bytearray()
        self.challenge = new_nonce()
        self.rank: int | None = None
        self.home = ""
        self.said_bye = False


@dataclass
class _Inquiry:
    """What ranks answer to the question what they are doing."""

    timeout_s: float
    deadline: float
    statuses: dict[int, dict[str, Any]] = field(default_factory=dict)


class LifelineServer:
    """Listens from construction on, in a daemon thread."""

    def __init__(self, host: str, world_size: int, key: bytes) -> None:
        """Binds a free port.

        Args:
            host: Local address to listen at.
            world_size: Number of ranks that will connect.
            key: What a connection has to prove to know; others are dropped.
        """
        self._world_size = world_size
        self._key = key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server(
            (host, 0), family=family, backlog=max(128, world_size)
        )
        self.port: int = self._listener.getsockname()[1]
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._members: dict[_Member, None] = {}  # in the order of connecting
        self._failure: Failure | None = None
        self._greeted: set[int] = set()
        self._ended: set[int] = set()
        self._stop_at = float("inf")
        self._inquiry: _Inquiry | None = None
        self._thread = threading.Thread(target=self._run, name="mpxla-lifeline-server", daemon=True)
        self._thread.start()

    def sockets(self) -> list[socket.socket]:
        """Returns the open sockets, for a forked child to close."""
        members = [member.connection for member in self._members]
        return [self._listener, self._wake_read, self._wake_write, *members]

    def stop(self, linger_s: float) -> None:
        """Ends the thread as soon as every rank has left, at the latest after `linger_s`."""
        self._stop_at = time.monotonic() + linger_s
        with contextlib.suppress(OSError):  # it has ended before
            self._wake_write.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over():
            until = min(self._stop_at, self._inquiry.deadline if self._inquiry else float("inf"))
            left_s = max(until - time.monotonic(), 0.0)
            for key, _ in self._selector.select(left_s if left_s < 3600 else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_read:
                    self._wake_read.recv(64)
                else:
                    self._read(key.data)
            self._judge()
        self._selector.close()
        for connection in self.sockets():
            connection.close()

    def _is_over(self) -> bool:
        if self._stop_at == float("inf"):
            return False
        has_told_all = self._failure is not None or len(self._ended) == self._world_size
        return has_told_all or time.monotonic() >= self._stop_at

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the caller hung up before it was accepted
            return
        connection.settimeout(_SEND_TIMEOUT_S)
        set_keepalive(connection)
        member = _Member(connection)
        self._members[member] = None
        self._selector.register(connection, selectors.EVENT_READ, member)
        strangers = [other for other in self._members if other.rank is None]
        if len(strangers) > self._world_size + _MAX_STRANGERS:
            self._drop(strangers[0])
        self._send(member, type="challenge", nonce=member.challenge)

    def _read(self, member: _Member) -> None:
        try:
            data = member.connection.recv(65536)
            member.buffer += data
            is_known = member.rank is not None or self._greet(member)
            messages = decode(member.buffer) if is_known else []
        except Stranger as error:
            _warn_of(member, error)
            data, messages = b"", []
        except (OSError, ValueError, KeyError):  # reset, or no message
            data, messages = b"", []
        for message in messages:
            self._handle(member, message)
        if not data:
            self._drop(member)

    def _greet(self, member: _Member) -> bool:
        """Takes the first message of a connection, from whomever it may be.

        Returns:
            Whether it has come, and was that of a rank.

        Raises:
            Stranger: It was not.
        """
        end = member.buffer.find(b"\n")
        if end < 0 and len(member.buffer) <= MAX_HELLO_BYTES:
            return False
        line = bytes(member.buffer[:end])
        rank, home, proof = answer_hello(self._key, line, member.challenge, self._world_size)
        if rank in self._greeted:
            raise Stranger(f"rank {rank} is connected already")
        del member.buffer[: end + 1]
        member.rank, member.home = rank, home
        self._send(member, type="welcome", proof=proof)
        self._greeted.add(rank)
        if self._failure is not None:
            self._send(member, type="failure", **self._failure._asdict())
        if len(self._greeted) == self._world_size:
            self._tell_all(type="ready")
        return True

    def _handle(self, member: _Member, message: dict[str, Any]) -> None:
        assert member.rank is not None
        if message["type"] == "report":
            self._fail(Failure(member.rank, message["text"]))
        elif message["type"] == "stall":
            if self._inquiry is None:
                self._inquiry = _Inquiry(message["timeout_s"], time.monotonic() + _ANSWER_S)
                self._tell_all(type="describe")
        elif message["type"] == "status":
            if self._inquiry is not None:
                self._inquiry.statuses[member.rank] = message
        elif message["type"] == "bye":
            member.said_bye = True
            self._ended.add(member.rank)
            self._tell_all(type="bye", rank=member.rank)

    def _judge(self) -> None:
        """Ends the inquiry when all have answered, or when it is too late for that."""
        inquiry = self._inquiry
        if inquiry is None:
            return
        answered = inquiry.statuses.keys() | self._ended
        if len(answered) < self._world_size and time.monotonic() < inquiry.deadline:
            return
        self._inquiry = None
        for rank in self._ended:
            inquiry.statuses.setdefault(rank, LEFT)
        found = explain_stall(inquiry.statuses, self._world_size, inquiry.timeout_s)
        if found is not None:
            self._fail(Failure(*found))

    def _drop(self, member: _Member) -> None:
        if member not in self._members:
            return
        del self._members[member]
        self._selector.unregister(member.connection)
        member.connection.close()
        if member.rank is None or member.said_bye:
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
            if member.rank is not None:
                self._send(member, **message)

    def _send(self, member: _Member, **message: Any) -> None:
        try:
            member.connection.sendall(encode(**message))
        except OSError:
            self._drop(member)


def _warn_of(member: _Member, error: Stranger) -> None:
    with contextlib.suppress(OSError):
        host = member.connection.getpeername()[0]
        warn_once(
            f"stranger {host} {error}",
            f"somebody at {host} connected to the lifeline of this job and was turned away: "
            f"{error}. If it was no rank of yours, see docs/security.md.",
        )
