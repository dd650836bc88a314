"""Seals on messages: that they come from a rank of this job, unchanged, in order and only once.

gloo and the store of torch.distributed cannot tell who is at the other end. So what is unpickled or
believed carries a code that only the ranks of this session can make: keyed BLAKE2 over the bytes,
source, destination, channel and the number of the message on that way.

    | code, 32 bytes | zeros | message ...             the message starts at 64

Seals do not hide anything. This file knows bytes only; it must not know what carries them.
"""

import hmac
import struct
import threading
from hashlib import blake2b

import torch

from mpxla.comm.packing import ALIGNMENT_BYTES, as_memory
from mpxla.errors import MpxlaError

__all__ = ["HEADER_BYTES", "Seal"]

HEADER_BYTES = ALIGNMENT_BYTES
_CODE_BYTES = 32
_PERSON = b"mpxla message"
_Way = tuple[str, int, tuple[int, ...]]
"""Channel, source, and whom it is for."""


class Seal:
    """Makes and checks the seals of one rank. Used by any thread, one per channel."""

    def __init__(self, rank: int, key: bytes) -> None:
        self._rank = rank
        self._key = key
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, _Way], int] = {}

    def close(self, data: torch.Tensor, channel: str, ranks: tuple[int, ...]) -> torch.Tensor:
        """Makes the seal of this rank's next message, a flat uint8 host tensor [num_bytes].

        It is for the receiver alone, or for the group of a collective.

        Returns:
            What has to precede the message: uint8 [HEADER_BYTES].
        """
        way = (channel, self._rank, ranks)
        code = self._code(way, self._count("sent", way), data)
        return torch.frombuffer(bytearray(code.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)

    def open(
        self, sealed: torch.Tensor, channel: str, src: int, ranks: tuple[int, ...]
    ) -> torch.Tensor:
        """Checks the next message of another rank.

        Returns:
            The message, a view of `sealed`.

        Raises:
            MpxlaError: The seal is not right.
        """
        way = (channel, src, ranks)
        number = self._count("taken", way)
        message = sealed[HEADER_BYTES:]
        code = bytes(as_memory(sealed[:_CODE_BYTES]))
        if len(sealed) < HEADER_BYTES or not hmac.compare_digest(
            code, self._code(way, number, message)
        ):
            raise MpxlaError(
                f"rank {self._rank} received {message.numel()} bytes on channel {channel!r} that "
                f"do not come from rank {src} of this job, or were changed or repeated on their "
                f"way (seal of message {number} is wrong). They were not opened. Somebody else "
                f"can reach the ports of this job: see docs/security.md."
            )
        return message

    def _count(self, kind: str, way: _Way) -> int:
        with self._lock:
            number = self._counts.get((kind, way), 0)
            self._counts[kind, way] = number + 1
        return number

    def _code(self, way: _Way, number: int, data: torch.Tensor) -> bytes:
        channel, src, ranks = way
        name = channel.encode()
        code = blake2b(key=self._key, digest_size=_CODE_BYTES, person=_PERSON)
        code.update(struct.pack("<HqqI", len(name), src, number, len(ranks)) + name)
        code.update(struct.pack(f"<{len(ranks)}q", *ranks))
        code.update(as_memory(data))
        return code.digest()
