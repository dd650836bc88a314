"""Whether all replicas are in the same step: each tells the others of its group what it does.

Replicas that called different step functions would add up gradients of different parameters, and
those whose optimizers have other learning rates would drift apart, both without an error. So when a
step begins, one small message goes to every other replica, on the host, and before the first
gradients leave, those of the others have to have come. All see a difference, wherever it is.

This file must not know what is reduced.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch

from mpxla.comm.handle import Handle
from mpxla.comm.transport import Transport
from mpxla.errors import RankMismatch

__all__ = ["Accord"]

_CHANNEL = "accord"
_DIGEST_BYTES = 8


class Accord:
    """What one replica tells the others of its group in every step that ends in a reduction."""

    def __init__(self, transport: Transport, group: Sequence[int]):
        self._transport = transport
        self._others = [rank for rank in group if rank != transport.rank]
        self._own: tuple[bytes, bytes] = (b"", b"")
        self._settings = ""
        self._arriving: list[tuple[int, Handle[torch.Tensor]]] = []
        self._is_same = True

    def announce(self, flow: str, settings: str) -> None:
        """Called when a step begins.

        Args:
            flow: what will be reduced, in words that are equal on all replicas.
            settings: of the optimizers, in such words.
        """
        self._own, self._settings = (_digest(flow), _digest(settings)), settings
        message = torch.frombuffer(bytearray(b"".join(self._own)), dtype=torch.uint8)
        transport, others = self._transport, self._others
        self._arriving = [(rank, transport.recv(None, rank, _CHANNEL)) for rank in others]
        for rank in others:
            transport.send([message], rank, _CHANNEL)

    def check(self, wait: Callable[[Handle[torch.Tensor]], torch.Tensor]) -> bool:
        """Called before anything is reduced, and at the end of the step; once is enough.

        Args:
            wait: gives a message, or the error that explains why it does not come.

        Returns:
            Whether all replicas reduce the same.

        Raises:
            RankMismatch: another replica has other settings.
        """
        if not self._arriving:
            return self._is_same
        arriving, self._arriving = self._arriving, []
        received = [(rank, wait(handle).numpy().tobytes()) for rank, handle in arriving]
        for rank, message in received:
            if message[_DIGEST_BYTES:] != self._own[1]:
                here = f"rank {self._transport.rank}"
                raise RankMismatch(
                    f"{here} has other settings of its optimizer than rank {rank}, so their "
                    f"parameters would differ after the update. On {here}: {self._settings}. Give "
                    f"all replicas the same settings; a scheduler that follows the loss needs its "
                    f"mean over replicas (smp.allgather(loss, smp.DP_GROUP))."
                )
        self._is_same = all(m[:_DIGEST_BYTES] == self._own[0] for _, m in received)
        return self._is_same


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
