"""What the replicas of a group tell each other: what each does next together with the others.

Replicas that called different step functions would add up gradients of different parameters, those
whose optimizers have other learning rates would drift apart, collectives inside of one's programs
would meet another's that they do not belong to, and one that has had its last step would be waited
for. So each sends every other one a small message, on the host, before

    step   it runs a step that reduces gradients, with digests of what, by which settings and with
           which exchanges; looked at before the first gradients leave
    call   it makes a call of the user that all of them make, or none
    update it runs an update that replicas divide
    end    its training is over

Messages arrive in the order of sending, so the first that differ show where replicas part. All see
a difference, wherever it is. A step may reduce gradients of several models, but replicas meet once.
Inside `model.join()` they meet by `Join` instead. This file must not know what is reduced.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from mpxla.comm.handle import Handle
from mpxla.comm.objects import Objects
from mpxla.comm.transport import Transport
from mpxla.comm.worker import Worker
from mpxla.errors import PeerFailure, RankMismatch
from mpxla.parallel.gradients.join import Collective, Join

__all__ = ["Rounds"]

_CHANNEL = "rounds"
_FAREWELL_S = 10.0
"""How long a rank stays for the others' farewells. One may wait for it elsewhere, by mistake."""


class Rounds:
    """The rounds of one rank of a group that reduces together.

    Attributes:
        hooks: the thread on which comm hooks run.
    """

    def __init__(self, transport: Transport, objects: Objects, group: Sequence[int]):
        self._transport = transport
        self._objects = objects
        self._group = tuple(group)
        self._others = [rank for rank in group if rank != transport.rank]
        self._arriving: dict[int, Handle[torch.Tensor]] = {
            rank: transport.recv(None, rank, _CHANNEL) for rank in self._others
        }
        self._num_steps = self._num_updates = 0
        self._own: Mapping[str, str] = {}
        self._settings = ""
        self._awaits_steps = False
        self._is_same = True
        self._have_drifted_alike = True
        self._join: Join | None = None
        self.hooks = Worker("mpxla-comm-hook")

    # --- steps ----------------------------------------------------------------------------------

    def count_step(self) -> None:
        """Counts a reduction, before it starts."""
        self._num_steps += 1

    def begin_step(
        self,
        description: str,
        settings: str,
        exchanges: str,
        outline: Callable[[], Sequence[Collective]],
        drifted: str = "",
    ) -> int:
        """Called before every reduction: counts it, and inside `join` finds who takes part.

        Texts say what is reduced, with what settings and exchanges, and what evaluations have
        written before, in words that are equal on replicas that do the same; the outline has the
        collectives, in their order.

        Returns:
            Index of the replica whose buffers count.
        """
        self.count_step()
        if self._join is not None:
            return self._join.meet(description, outline())
        self._settings, self._awaits_steps = settings, True
        if self._others:
            texts = {
                "flow": description,
                "settings": settings,
                "exchanges": exchanges,
                "drifted": drifted,
            }
            self._own = {name: _digest(text) for name, text in texts.items()}
            self._tell("step", **self._own)
        return 0

    def is_same(self) -> bool:
        """Waits until all replicas have begun the step; whether they reduce the same.

        Called before anything is reduced, and at the end of the step; once is enough.

        Raises:
            RankMismatch: another replica has other settings or other exchanges, is in a call of the
                user, or has had its last step.
        """
        if self._join is not None:
            return True
        if not self._awaits_steps:
            return self._is_same
        self._awaits_steps, self._is_same, self._have_drifted_alike = False, True, True
        for rank in self._others:
            told = self._next(rank)
            self._check(rank, told)
            self._is_same &= told["flow"] == self._own["flow"]
            self._have_drifted_alike &= told["drifted"] == self._own["drifted"]
        return self._is_same

    def have_drifted_alike(self) -> bool:
        """Waits like `is_same`; whether evaluations have written the same on all replicas.

        Inside of `join` nobody asks the others.
        """
        self.is_same()
        return self._join is not None or self._have_drifted_alike

    def _check(self, rank: int, told: Mapping[str, Any]) -> None:
        """Checks what another replica has told instead of its step, or of that."""
        here = f"rank {self._transport.rank}"
        if told["kind"] == "end":
            raise RankMismatch(self._text(rank, f"ended after {told['steps']}"))
        if told["kind"] in ("call", "update"):
            raise RankMismatch(self._call_text(rank, told, "a training step"))
        if told["exchanges"] != self._own["exchanges"]:
            raise RankMismatch(
                f"{here} exchanges other values with its replicas inside of this step than rank "
                f"{rank} does (nn.SyncBatchNorm, divided parameters or gradients). Call the same "
                f"step function on all replicas, with arguments that lead to the same layers."
            )
        if told["settings"] != self._own["settings"]:
            raise RankMismatch(
                f"{here} has other settings of its optimizer than rank {rank}, so their parameters "
                f"would differ after the update. On {here}: {self._settings}. Give all replicas "
                f"the same settings; a scheduler that follows the loss needs its mean over "
                f"replicas (smp.allgather(loss, smp.DP_GROUP))."
            )

    def gather(self, own: Any) -> list[Any]:
        """What each replica has, by the order of the group; all call it at the end of a step."""
        return self._objects.allgather(own, self._group)

    # --- calls, and the end ---------------------------------------------------------------------

    def meet(self, what: str, line: str) -> None:
        """Before a call of the user, at a line, that all ranks of the group make together.

        Raises:
            RankMismatch: another rank makes another call, or has had other numbers of reductions.
        """
        self._tell("call", what=what, line=line)
        for rank in self._others:
            call = self._await(rank, "call", "update")
            if call["kind"] == "update" or call["what"] != what:
                raise RankMismatch(self._call_text(rank, call, f"{what}{line}"))
            if call["steps"] != self._num_steps:
                raise RankMismatch(self._text(rank, f"{call['steps']}, in {what}{line}"))

    def tell_of_update(self, what: str, line: str) -> None:
        """Before an update that replicas divide. Who waits for another call learns of it so."""
        if self._join is None:
            self._num_updates += 1
            self._tell("update", what=what, line=line)

    def leave(self) -> None:
        """Tells the others that this rank's training is over, and waits a while until theirs is.

        Raises:
            RankMismatch: they had other numbers of reductions.
            PeerFailure: a rank has failed, which the script has not met.
        """
        watch = self._transport.watch
        if not self._others or watch.noticed.is_set():
            return  # nobody waits for this rank, or the script has met the failure
        try:
            watch.check()  # a rank that comes late would end well otherwise
            self._part()
        except PeerFailure as failure:
            raise PeerFailure(
                f"{failure} This rank ended after {self._num_steps} training steps."
            ) from failure

    def _part(self) -> None:
        """See `leave`."""
        self._tell("end")
        deadline = time.monotonic() + _FAREWELL_S
        for rank in self._others:
            try:
                steps = self._await(rank, "end", deadline=deadline)["steps"]
            except TimeoutError:
                return  # it is busy; should it wait for this rank, it will know the numbers
            if steps != self._num_steps:
                with contextlib.suppress(PeerFailure):
                    self._transport.barrier(self._group).result()  # all know it before one ends
                raise RankMismatch(self._text(rank, f"ended after {steps}"))

    def _call_text(self, rank: int, call: Mapping[str, Any], own: str) -> str:
        return (
            f"rank {rank} called {call['what']}{call['line']}, while rank {self._transport.rank} "
            f"was in {own}. All ranks of all replicas have to call {call['what']}: call it outside "
            f"of `if smp.rank() == 0:`, and use the result on one rank."
        )

    def _text(self, rank: int, what: str) -> str:
        return (
            f"replicas have different numbers of training steps: rank {self._transport.rank} has "
            f"{self._num_steps}, and rank {rank} {what}. Give all replicas the same number of "
            f"batches (DistributedSampler with drop_last=True), or train inside `with "
            f"model.join():`."
        )

    # --- messages -------------------------------------------------------------------------------

    def _tell(self, kind: str, **more: str) -> None:
        told = {"kind": kind, "steps": self._num_steps, "updates": self._num_updates, **more}
        message = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
        for rank in self._others:
            self._transport.send([message], rank, _CHANNEL)

    def _next(self, rank: int, deadline: float | None = None) -> dict[str, Any]:
        """What another replica does next, but for updates that this one has had, too.

        Raises:
            PeerFailure: it failed, or has left.
            TimeoutError: nothing has come by the deadline.
        """
        while True:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            message = self._arriving[rank].result(left_s)
            self._arriving[rank] = self._transport.recv(None, rank, _CHANNEL)
            told = json.loads(bytes(message.tolist()))
            if told["kind"] != "update" or told["updates"] > self._num_updates:
                return told

    def _await(self, rank: int, *kinds: str, deadline: float | None = None) -> dict[str, Any]:
        """The next message of some kind. Who has sent another one sees this rank's, and says so."""
        while (told := self._next(rank, deadline))["kind"] not in kinds:
            pass
        return told

    # --- uneven batches -------------------------------------------------------------------------

    @property
    def is_uneven(self) -> bool:
        """Whether replicas may run out of batches at different times."""
        return self._join is not None

    def begin_join(self) -> None:
        """From now on, replicas may run out of batches at different times."""
        self._join = Join(self._transport, self._objects, self._group, self.count_step)

    def end_join(self, is_orderly: bool) -> int | None:
        """This replica has no more batches: takes part in the others' steps until all are done.

        Args:
            is_orderly: whether the loop ended without an error; else nobody is waited for.

        Returns:
            Index of the replica whose values everyone has to take over; None if all did as much.
        """
        assert self._join is not None
        join, self._join = self._join, None
        return join.stay() if is_orderly else None


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
