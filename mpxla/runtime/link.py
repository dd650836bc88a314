"""Messages between the stages of one pipeline, over the session's transport.

Adapts pipeline ranks and stages to global ranks, and host tensors to device tensors.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpxla.comm.handle import Handle
from mpxla.comm.transport import Use
from mpxla.device.backend import Backend
from mpxla.stage.spec import TensorSpec, Transfer

__all__ = ["Arrival", "PipelineLink"]


class PipelineLink:
    """Sends to and receives from the other ranks of this rank's pipeline, by pp_rank."""

    def __init__(self, transport: Any, group: Sequence[int], backend: Backend):
        self._transport = transport
        self._group = tuple(group)
        self._backend = backend
        self._placement: tuple[int, ...] = ()

    def set_placement(self, placement: tuple[int, ...]) -> None:
        """Tells which pipeline rank runs each stage of the step that runs next."""
        self._placement = placement

    def prepare(self, transfers: Sequence[Transfer], placement: Sequence[int]) -> None:
        """Readies the messages of a step. Every rank of the pipeline calls it, before the step."""
        uses: list[Use] = []
        for transfer in transfers:
            ends = placement[transfer.source], placement[transfer.target]
            if ends[0] != ends[1]:
                ranks = tuple(self._group[pp_rank] for pp_rank in ends)
                uses.append(Use("message", ranks, transfer.specs))
        self._transport.prepare(uses, self._group)

    def send(self, tensors: Sequence[torch.Tensor], transfer: Transfer, channel: str) -> None:
        """Starts sending one stage's message to another; returns at once."""
        self.send_to(self._placement[transfer.target], tensors, channel)

    def receive(self, transfer: Transfer, channel: str) -> "Arrival":
        """Expects one stage's message; the returned object waits for it when it is called."""
        return self.receive_from(self._placement[transfer.source], transfer.specs, channel)

    def send_to(self, pp_rank: int, tensors: Sequence[torch.Tensor], channel: str) -> Handle[None]:
        """Starts sending tensors to another pipeline rank as one message; returns at once.

        What the user can reach must not be changed in place before the handle is done: the sender
        reads it later, in a thread of its own. `hand_over` is for what may change before.
        """
        return self._transport.send(list(tensors), self._group[pp_rank], channel)

    def hand_over(
        self, source: int, targets: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Gives the values that tensors of one rank have now to others; all these ranks call it.

        Tensors of the device may be changed in place when it returns: gradients are clipped right
        after a step, and a checkpoint is loaded right after parameters got their places. Those of
        the targets only say shapes and types.

        Returns:
            On the targets the values, on the device; None on all other ranks.
        """
        pp_rank = self._group.index(self._transport.rank)
        if pp_rank == source and targets:
            kept = [self._backend.view(tensor) for tensor in tensors]
            for target in targets:
                self.send_to(target, kept, "tied")
        elif pp_rank in targets:
            return self.receive_from(source, [TensorSpec.of(t) for t in tensors], "tied")()
        return None

    def receive_from(self, pp_rank: int, specs: Sequence[TensorSpec], channel: str) -> "Arrival":
        """Expects one message; the returned object waits and gives device tensors when called."""
        return Arrival(self.expect_from(pp_rank, specs, channel), self._backend)

    def expect_from(
        self, pp_rank: int, specs: Sequence[TensorSpec], channel: str
    ) -> Callable[[], list[torch.Tensor]]:
        """`receive_from` that leaves the tensors where the transport puts them."""
        return self._transport.recv(list(specs), self._group[pp_rank], channel).result


class Arrival:
    """A message under way."""

    def __init__(self, wait: Callable[[], list[torch.Tensor]], backend: Backend):
        self._wait = wait
        self._backend = backend

    def __call__(self) -> list[torch.Tensor]:
        """Waits for the message and gives its tensors, on the device."""
        values = self._wait()
        # Several are parts of one message, whose memory would stay as long as any of them.
        return self._backend.put(values, owned=len(values) == 1)

    def when_arrived(self) -> float:
        """Waits for the message, and tells the monotonic time when it was there."""
        self._wait()
        return time.monotonic()
