"""How both ends of a connection prove that they know the key of the session, without telling it.

    the end that accepted  -> challenge   a nonce
    the end that connected -> hello       its rank, a nonce of its own, proof over both nonces
    the end that accepted  -> welcome     proof over both nonces, the other way round

A proof is an HMAC over the nonces, the rank and the direction, so that a recorded one is worth
nothing and none can be reflected. One line of JSON each. What comes before a right proof is looked
at with care: it may be anything.

This file knows sockets; it must not know what they are for.
"""

import hashlib
import hmac
import json
import secrets
import socket
from typing import Any

from mpxla.errors import PeerFailure

__all__ = ["Stranger", "answer_hello", "introduce", "new_nonce", "welcome"]

_MAX_HELLO_BYTES = 4096
"""Longest message of somebody who has not proved anything yet."""


class Stranger(ValueError):  # noqa: N818 - named for who it is
    """The other end is no rank of this job."""


def new_nonce() -> str:
    """A number that was never used and cannot be foreseen, as text."""
    return secrets.token_hex(32)


def answer_hello(key: bytes, line: bytes, challenge: str, world_size: int) -> tuple[int, str, str]:
    """Checks who has connected.

    Returns:
        (rank, where it runs, proof for the welcome).

    Raises:
        Stranger: It has not proved to be a rank of this job.
    """
    try:
        hello = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Stranger("what it said is no greeting") from error
    if not isinstance(hello, dict) or hello.get("type") != "hello":
        raise Stranger("what it said is no greeting")
    rank, home, nonce, proof = (hello.get(name) for name in ("rank", "home", "nonce", "proof"))
    if type(rank) is not int or not 0 <= rank < world_size:
        raise Stranger("there is no such rank")
    if not isinstance(nonce, str) or not isinstance(proof, str) or not isinstance(home, str):
        raise Stranger("a greeting without a proof")
    if not _is_equal(proof, _prove(key, "hello", rank, challenge, nonce)):
        raise Stranger(f"it says that it is rank {rank}, and cannot prove it")
    return rank, home, _prove(key, "welcome", rank, nonce, challenge)


def welcome(connection: socket.socket, key: bytes, world_size: int) -> tuple[int, str]:
    """Lets the end that connected prove its rank, and proves this end; waits for it.

    Gives the rank, and where it runs. The connection has a timeout. Not a byte behind the hello is
    read.

    Raises:
        Stranger: It has not proved to be a rank of this job.
        OSError: It hung up, or said nothing in time.
    """
    challenge = new_nonce()
    _send_line(connection, type="challenge", nonce=challenge)
    try:
        hello = _read_line(connection)
    except (ValueError, RecursionError) as error:
        raise Stranger("what it said is no greeting") from error
    rank, home, proof = answer_hello(key, hello, challenge, world_size)
    _send_line(connection, type="welcome", proof=proof)
    return rank, home


def introduce(
    connection: socket.socket, key: bytes, rank: int, home: str, other: str = "rank 0"
) -> None:
    """Proves this rank to the end that accepted, and lets it prove itself.

    The connection has a timeout. Not a byte behind the welcome is read. Texts say where this rank
    runs (`home`), and who should be at the other end.

    Raises:
        PeerFailure: The other end refuses, or cannot prove that it belongs to the job.
    """
    where = "{} port {}".format(*connection.getpeername()[:2])
    try:
        challenge = _read_message(connection).get("nonce")
        nonce = new_nonce()
        proof = _prove(key, "hello", rank, str(challenge), nonce)
        _send_line(connection, type="hello", rank=rank, home=home, nonce=nonce, proof=proof)
        answer = _read_message(connection).get("proof")
    except (OSError, ValueError, RecursionError) as error:
        raise PeerFailure(
            f"rank {rank} connected to {where}, which did not take it for a rank of this job "
            f"({error}). Look at the output of {other}, and see that nothing else uses that port."
        ) from error
    if not _is_equal(str(answer), _prove(key, "welcome", rank, nonce, str(challenge))):
        raise PeerFailure(
            f"rank {rank} connected to {where}, where somebody answered who does not know the "
            f"secret of this job. See docs/security.md."
        )


def _send_line(connection: socket.socket, **message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read_line(connection: socket.socket) -> bytes:
    """One line, byte by byte: what follows it belongs to somebody else."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > _MAX_HELLO_BYTES:
            raise ValueError("it hung up" if not byte else "no greeting")
        line += byte
    return bytes(line)


def _read_message(connection: socket.socket) -> dict[str, Any]:
    message = json.loads(_read_line(connection))
    if not isinstance(message, dict):
        raise ValueError("no greeting")
    return message


def _prove(key: bytes, role: str, rank: int, *nonces: str) -> str:
    text = json.dumps(["mpxla", role, rank, *nonces]).encode()
    return hmac.digest(key, text, hashlib.sha256).hex()


def _is_equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))
