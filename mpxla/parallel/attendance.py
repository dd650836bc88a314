"""Whether all replicas are still training: no wait for one that has had its last step.

Every replica counts its reductions. When a session ends, each rank tells the others of its group
how many it had, and waits for theirs; a rank whose reduction does not complete looks whether such a
message has come. So different numbers of batches are an error on all ranks that names the numbers,
and not a hang. This file must not know what is reduced.
"""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpxla.comm.handle import Handle
from mpxla.comm.transport import Transport
from mpxla.errors import PeerFailure, RankMismatch

__all__ = ["Attendance"]

_CHANNEL = "attendance"
_CALLS = "attendance-calls"
_FIRST_LOOK_S = 1.0
_LONGEST_LOOK_S = 64.0
"""Longer than the time after which a wait is logged."""
_FAREWELL_S = 10.0
"""How long a rank stays for the others' farewells. One may wait for it elsewhere, by mistake."""


class Attendance:
    """Counts the reductions of one rank and knows when the others of its group have left."""

    def __init__(self, transport: Transport, group: Sequence[int]):
        self._transport = transport
        self._group = tuple(group)
        self._others = [rank for rank in group if rank != transport.rank]
        self._farewells: dict[int, Handle[torch.Tensor]] = {
            rank: transport.recv(None, rank, _CHANNEL) for rank in self._others
        }
        self._calls = {rank: transport.recv(None, rank, _CALLS) for rank in self._others}
        self._num_steps = 0

    def count_step(self) -> None:
        """Counts a reduction, before it starts."""
        self._num_steps += 1

    def wait(self, handle: Handle[torch.Tensor]) -> torch.Tensor:
        """The result of a collective of the group.

        Raises:
            RankMismatch: another rank has left after fewer reductions than this one started.
        """
        patience_s = _FIRST_LOOK_S
        while True:
            try:
                return handle.result(timeout_s=patience_s)
            except (PeerFailure, TimeoutError) as error:
                self._look_around()
                if isinstance(error, PeerFailure):
                    raise
                patience_s = min(2 * patience_s, _LONGEST_LOOK_S)

    def _look_around(self) -> None:
        for rank, farewell in self._farewells.items():
            if farewell.done():
                steps = _number(farewell.result())
                if steps < self._num_steps:
                    raise RankMismatch(self._text(rank, f"ended after {steps}"))

        for rank, call in self._calls.items():
            # A rank may have had this reduction already, and be ahead.
            if call.done() and _read(call.result())["steps"] < self._num_steps:
                raise RankMismatch(self._call_text(rank, _read(call.result()), "a training step"))

    def meet(self, what: str, line: str) -> None:
        """Before a call of the user, at a line, that all ranks of the group make together.

        Raises:
            RankMismatch: another rank makes another call, or has had other numbers of reductions.
        """
        own = {"steps": self._num_steps, "what": what, "line": line}
        message = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        for rank in self._others:
            self._transport.send([message], rank, _CALLS)
        for rank in self._others:
            call = _read(self._calls[rank].result())
            self._calls[rank] = self._transport.recv(None, rank, _CALLS)
            if call["what"] != what:
                raise RankMismatch(self._call_text(rank, call, f"{what}{line}"))
            if call["steps"] != self._num_steps:
                raise RankMismatch(self._text(rank, f"{call['steps']}, in {what}{line}"))

    def _call_text(self, rank: int, call: Mapping[str, Any], own: str) -> str:
        return (
            f"rank {rank} called {call['what']}{call['line']}, while rank {self._transport.rank} "
            f"was in {own}. All ranks of all replicas have to call {call['what']}: call it outside "
            f"of `if smp.rank() == 0:`, and use the result on one rank."
        )

    def leave(self) -> None:
        """Tells the others that this rank's training is over, and waits a while until theirs is.

        Raises:
            RankMismatch: they had other numbers of reductions.
            PeerFailure: one of them failed.
        """
        if self._transport.watch.failure is not None:
            return
        own = torch.tensor([self._num_steps], dtype=torch.int64).view(torch.uint8)
        for rank in self._others:
            self._transport.send([own], rank, _CHANNEL)
        deadline = time.monotonic() + _FAREWELL_S
        for rank, farewell in self._farewells.items():
            try:
                left_s = max(deadline - time.monotonic(), 0.0)
                steps = _number(farewell.result(timeout_s=left_s))
            except TimeoutError:
                return  # it is busy; should it wait for this rank, it will know the numbers
            except PeerFailure as failure:
                raise PeerFailure(
                    f"{failure} This rank ended after {self._num_steps} training steps."
                ) from failure
            if steps != self._num_steps:
                with contextlib.suppress(PeerFailure):
                    self._transport.barrier(self._group).result()  # all know it before one ends
                raise RankMismatch(self._text(rank, f"ended after {steps}"))

    def _text(self, rank: int, what: str) -> str:
        return (
            f"replicas have different numbers of training steps: rank {self._transport.rank} has "
            f"{self._num_steps}, and rank {rank} {what}. Give all replicas the same number of "
            f"batches (DistributedSampler with drop_last=True), or train inside `with "
            f"model.join():`."
        )


def _read(message: torch.Tensor) -> dict[str, Any]:
    return json.loads(bytes(message.tolist()))


def _number(message: torch.Tensor) -> int:
    return int(message.view(torch.int64).item())
