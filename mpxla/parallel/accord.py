"""Whether all replicas are in the same step: each tells the next one of its group what it does.

Replicas that called different step functions would add up gradients of different parameters, and
those whose optimizers have other learning rates would drift apart, both without an error. So when a
step begins, one small message goes to the next replica, on the host, and before the first gradients
leave, the message of the previous one has to have come:

    replica 0 --> replica 1 --> replica 2 --> replica 0      any difference is between two of them

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
    """What one replica tells the next one of its group in every step that ends in a reduction."""

    def __init__(self, transport: Transport, group: Sequence[int]):
        self._transport = transport
        place = group.index(transport.rank)
        self._before = group[place - 1]
        self._after = group[(place + 1) % len(group)]
        self._own: tuple[bytes, bytes] = (b"", b"")
        self._settings = ""
        self._arriving: Handle[torch.Tensor] | None = None

    def announce(self, flow: str, settings: str) -> None:
        """Called when a step begins.

        Args:
            flow: what will be reduced, in words that are equal on all replicas.
            settings: of the optimizers, in such words.
        """
        self._own, self._settings = (_digest(flow), _digest(settings)), settings
        message = torch.frombuffer(bytearray(b"".join(self._own)), dtype=torch.uint8)
        self._arriving = self._transport.recv(None, self._before, _CHANNEL)
        self._transport.send([message], self._after, _CHANNEL)

    def check(self, wait: Callable[[Handle[torch.Tensor]], torch.Tensor]) -> None:
        """Called before anything is reduced, and at the end of the step; once is enough.

        Args:
            wait: gives the message, or the error that explains why it does not come.

        Raises:
            RankMismatch: the previous replica does something else.
        """
        if self._arriving is None:
            return
        arriving, self._arriving = self._arriving, None
        received = wait(arriving).numpy().tobytes()
        flow, settings = received[:_DIGEST_BYTES], received[_DIGEST_BYTES:]
        here = f"rank {self._transport.rank}"
        if flow != self._own[0]:
            raise RankMismatch(
                f"{here} trains other parameters in this step than rank {self._before} does, or "
                f"was given other options of smp.DistributedModel, so their gradients cannot be "
                f"averaged. Call the same step function on all replicas, with arguments that lead "
                f"to the same layers, freeze the same parameters, and draw numbers that choose "
                f"layers from equal seeds."
            )
        if settings != self._own[1]:
            raise RankMismatch(
                f"{here} has other settings of its optimizer than rank {self._before}, so their "
                f"parameters would differ after the update. On {here}: {self._settings}. Give "
                f"all replicas the same settings; a scheduler that follows the loss needs its mean "
                f"over replicas (smp.allgather(loss, smp.DP_GROUP))."
            )


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
