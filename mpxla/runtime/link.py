"""Messages between the stages of one pipeline, over the session's transport.

Adapts pipeline ranks and stages to global ranks, and host tensors to device tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpxla.comm.transport import Use
from mpxla.stage.device import to_device
from mpxla.stage.spec import TensorSpec, Transfer

__all__ = ["PipelineLink"]


class PipelineLink:
    """Sends to and receives from the other ranks of this rank's pipeline.

    Args:
        transport: the session's transport.
        group: global ranks of the pipeline, by pp_rank.
        device: this rank's device; received tensors are put there.
    """

    def __init__(self, transport: Any, group: Sequence[int], device: torch.device):
        self._transport = transport
        self._group = tuple(group)
        self._device = device
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

    def receive(self, transfer: Transfer, channel: str) -> Callable[[], list[torch.Tensor]]:
        """Expects one stage's message; the returned function waits for it."""
        return self.receive_from(self._placement[transfer.source], transfer.specs, channel)

    def send_to(self, pp_rank: int, tensors: Sequence[torch.Tensor], channel: str) -> None:
        """Starts sending tensors to another pipeline rank as one message; returns at once."""
        self._transport.send_many(list(tensors), self._group[pp_rank], channel)

    def receive_from(
        self, pp_rank: int, specs: Sequence[TensorSpec], channel: str
    ) -> Callable[[], list[torch.Tensor]]:
        """Expects one message; the returned function waits and gives device tensors."""
        arrival = self.expect_from(pp_rank, specs, channel)
        return lambda: to_device(arrival(), self._device)

    def expect_from(
        self, pp_rank: int, specs: Sequence[TensorSpec], channel: str
    ) -> Callable[[], list[torch.Tensor]]:
        """`receive_from` that leaves the tensors where the transport puts them."""
        return self._transport.recv_many(list(specs), self._group[pp_rank], channel).result
