"""What several ranks do together: all succeed, or all raise the same error.

An `Exchange` is how outcomes travel. While training stands still it is the session's object
communication; in the background it is messages of its own beside that, because collectives belong
to the main thread. Either ends with an error when a rank dies. This module must not know files.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from mpxla.comm.codec import DATA
from mpxla.comm.handle import Wait
from mpxla.comm.objects import Objects
from mpxla.comm.transport import Transport
from mpxla.errors import CheckpointError, PeerFailure
from mpxla.session import Session

__all__ = ["BackgroundExchange", "Exchange", "ObjectExchange", "together"]

T = TypeVar("T")


class Exchange(Protocol):
    """Gathers one value from every rank on every rank."""

    rank: int
    world_size: int

    def allgather(self, value: Any) -> list[Any]:
        """What every rank passed, by rank; every rank calls it. Values are data."""
        ...

    def working(self) -> contextlib.AbstractContextManager[None]:
        """Around the work between two exchanges, for the table of a stall."""
        ...


class ObjectExchange:
    """By the session's object communication, on the main thread; `what` is what ranks do."""

    def __init__(self, session: Session, what: str):
        self.rank, self.world_size = session.rank, session.env.world_size
        self._session, self._what = session, what

    def allgather(self, value: Any) -> list[Any]:
        """See `Exchange`."""
        with self._session.progress.meeting(self._what):
            return self._session.objects.allgather(value, tuple(range(self.world_size)))

    def working(self) -> contextlib.AbstractContextManager[None]:
        """See `Exchange`."""
        return self._session.progress.busy(self._what)


class BackgroundExchange:
    """By messages of its own, which nothing of the main thread's waits for; from any thread."""

    def __init__(self, transport: Transport):
        self.rank, self.world_size = transport.rank, transport.world_size
        self._objects = Objects(transport, DATA._replace(channel="checkpoint"))
        self.wait: Wait | None = None
        """What it waits for at the moment."""

    def allgather(self, value: Any) -> list[Any]:
        """See `Exchange`.

        Raises:
            MpxlaError: a message does not come from a rank of this job.
            PeerFailure: a rank died meanwhile.
        """
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        self._objects.post(value, others, "a checkpoint's progress")
        return [value if r == self.rank else self._take(r) for r in range(self.world_size)]

    def working(self) -> contextlib.AbstractContextManager[None]:
        """See `Exchange`; the table shows the main thread."""
        return contextlib.nullcontext()

    def _take(self, rank: int) -> Any:
        self.wait = Wait((rank,), "its part of a checkpoint", time.monotonic())
        try:
            return self._objects.take(rank, f"rank {rank}'s part of a checkpoint")
        finally:
            self.wait = None


def together(exchange: Exchange, what: str, action: Callable[[], T]) -> list[T]:
    """Runs an action on every rank; if it fails on any, all raise. Every rank must call it.

    The action returns data, see `comm.codec`; `what` completes "... failed on rank 1".

    Returns:
        What the action returned on every rank.

    Raises:
        CheckpointError: naming every rank on which the action failed, and why.
    """
    cause: Exception | None = None
    outcome: dict[str, Any]
    try:
        with exchange.working():
            outcome = {"value": action()}
    except PeerFailure:
        raise
    except Exception as error:  # whatever it is, the other ranks have to hear of it
        cause = error
        outcome = {"error": _describe(error)}
    outcomes = exchange.allgather(outcome)
    failed = {rank: o["error"] for rank, o in enumerate(outcomes) if "error" in o}
    if not failed:
        return [o["value"] for o in outcomes]
    with contextlib.suppress(PeerFailure):
        exchange.allgather(None)  # nobody ends before all others know as much
    texts = dict.fromkeys(failed.values())
    where = "; ".join(
        f"on rank {', '.join(str(r) for r, t in failed.items() if t == text)}: {text}"
        for text in texts
    )
    raise CheckpointError(f"{what} failed {where}") from cause


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}"
    return f"{type(error).__name__}: {error}"
