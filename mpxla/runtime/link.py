"""Messages between the stages of one pipeline, over the session's transport.

Adapts pipeline ranks and stages to global ranks, and host tensors to device tensors.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from mpxla.stage.device import to_device
from mpxla.stage.spec import TensorSpec, Transfer

__all__ = ["Arrival", "PipelineLink"]


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

    def send(self, tensors: Sequence[torch.Tensor], transfer: Transfer, channel: str) -> None:
        """Starts sending one stage's message to another; returns at once."""
        self.send_to(self._placement[transfer.target], tensors, channel)

    def receive(self, transfer: Transfer, channel: str) -> "Arrival":
        """Expects one stage's message; the returned object waits for it when it is called."""
        return self.receive_from(self._placement[transfer.source], transfer.specs, channel)

    def send_to(self, pp_rank: int, tensors: Sequence[torch.Tensor], channel: str) -> None:
        """Starts sending tensors to another pipeline rank as one message; returns at once."""
        self._transport.send_many(list(tensors), self._group[pp_rank], channel)

    def receive_from(self, pp_rank: int, specs: Sequence[TensorSpec], channel: str) -> "Arrival":
        """Expects one message; the returned object waits and gives device tensors when called."""
        handle = self._transport.recv_many(list(specs), self._group[pp_rank], channel)
        return Arrival(handle, self._device)


class Arrival:
    """A message under way.

    Args:
        handle: the transport's.
        device: where its tensors go.
    """

    def __init__(self, handle: Any, device: torch.device):
        self._handle = handle
        self._device = device

    def __call__(self) -> list[torch.Tensor]:
        """Waits for the message and gives its tensors, on the device."""
        return to_device(self._handle.result(), self._device)

    def when_arrived(self) -> float:
        """Waits for the message, and tells the monotonic time when it was there on the host."""
        self._handle.result()
        return time.monotonic()
