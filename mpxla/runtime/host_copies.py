"""Saved values on their way to the host's memory and back, while programs run.

One thread per direction, as devices have an engine for each: an offload waits for the program that
computes its values, and a load must not wait behind it. The host's memory is tensors of PyTorch.
This module must not know when to copy; the schedule does.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from mpxla.device.backend import Backend, Buffer
from mpxla.runtime.buffers import LiveValues
from mpxla.schedule.action import Action, microbatch_of

__all__ = ["HostCopies"]


class HostCopies:
    """The copies of one step on one rank; to be closed after it.

    `note` is told of every copy, when it is done: its action, begin and end, monotonic.
    """

    def __init__(
        self,
        values: LiveValues,
        backend: Backend,
        note: Callable[[Action, float, float], None] | None = None,
    ):
        self._values = values
        self._backend = backend
        self._note = note
        self._to_host = ThreadPoolExecutor(1, "offload")
        self._to_device = ThreadPoolExecutor(1, "load")
        self._begun: dict[Action, tuple[list[int], Future[list[torch.Tensor]]]] = {}

    def offload(self, action: Action, there_anyway: Sequence[Buffer]) -> None:
        """Begins to copy what a forward saved, but for what is there anyway, such as inputs."""
        stays = set(map(id, there_anyway))
        own = self._values.own(action.stage, microbatch_of(action))
        moved = [value for value in own if id(value) not in stays]
        # The identities only: whoever holds a value keeps its memory on the device.
        names = [id(value) for value in moved]
        self._begun[action] = names, self._to_host.submit(self._timed, action, self._get, moved)

    def complete(self, offload: Action) -> None:
        """Waits for an offload, and frees the device's memory."""
        names, copies = self._begun.pop(offload)
        self._values.move_out(offload.stage, microbatch_of(offload), names, copies.result())

    def load(self, action: Action) -> None:
        """Begins to copy back what is on the host; the backward waits for it."""
        copies = self._values.on_host(action.stage, microbatch_of(action))
        arrival = self._to_device.submit(self._timed, action, self._backend.put, copies)
        self._values.move_in(action.stage, microbatch_of(action), arrival.result)

    def close(self) -> None:
        """Waits for what still runs; copies that have not begun, after an error, never do."""
        self._to_host.shutdown(cancel_futures=True)
        self._to_device.shutdown(cancel_futures=True)

    def _get(self, buffers: list[Buffer]) -> list[torch.Tensor]:
        # Where the device is the host, a view waits for its program alone, and this thread copies.
        if self._backend.is_host:
            return [self._backend.view(buffer).clone() for buffer in buffers]
        return self._backend.get(buffers)

    def _timed(
        self, action: Action, copy: Callable[[list[Any]], list[Any]], given: list[Any]
    ) -> list[Any]:
        begin = time.monotonic()
        copies = copy(given)
        if self._note is not None:
            self._note(action, begin, time.monotonic())
        return copies
