"""Whether all replicas are in the same step: each tells the others of its group what it does.

Replicas that called different step functions would add up gradients of different parameters, those
whose optimizers have other learning rates would drift apart, and collectives inside of one's
programs would meet another's that they do not belong to, all without an error. So when a step
begins, one small message goes to every other replica, on the host, and before the first gradients
leave, those of the others have to have come. All see a difference, wherever it is.

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
        self._own: tuple[bytes, bytes, bytes] = (b"", b"", b"")
        self._settings = ""
        self._arriving: list[tuple[int, Handle[torch.Tensor]]] = []
        self._is_same = True

    def announce(self, flow: str, settings: str, exchanges: str = "") -> None:
        """Called when a step begins: what is reduced, and with what settings and exchanges.

        In words that are equal on replicas that do the same.
        """
        self._own = _digest(flow), _digest(settings), _digest(exchanges)
        self._settings = settings
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
            RankMismatch: another replica has other settings, or other exchanges.
        """
        if not self._arriving:
            return self._is_same
        arriving, self._arriving = self._arriving, []
        here = f"rank {self._transport.rank}"
        self._is_same = True
        for rank, handle in arriving:
            message = wait(handle).numpy().tobytes()
            flow, settings, exchanges = (
                message[start : start + _DIGEST_BYTES]
                for start in range(0, 3 * _DIGEST_BYTES, _DIGEST_BYTES)
            )
            if exchanges != self._own[2]:
                raise RankMismatch(
                    f"{here} exchanges other values with its replicas inside of this step than "
                    f"rank {rank} does (nn.SyncBatchNorm, divided parameters or gradients). Call "
                    f"the same step function on all replicas, with arguments that lead to the same "
                    f"layers."
                )
            if settings != self._own[1]:
                raise RankMismatch(
                    f"{here} has other settings of its optimizer than rank {rank}, so their "
                    f"parameters would differ after the update. On {here}: {self._settings}. Give "
                    f"all replicas the same settings; a scheduler that follows the loss needs its "
                    f"mean over replicas (smp.allgather(loss, smp.DP_GROUP))."
                )
            self._is_same &= flow == self._own[0]
        return self._is_same


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
