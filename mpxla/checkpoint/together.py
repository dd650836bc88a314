"""What several ranks do together: all succeed, or all raise the same error.

An `Exchange` is how outcomes travel. While training stands still it is the session's object
communication; in the background it is the launcher's key-value store, because the transport belongs
to the main thread. Either ends with an error when a rank dies. This module must not know files.
"""

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.distributed import Store

from mpxla.comm.handle import Wait
from mpxla.comm.seal import Seal
from mpxla.errors import CheckpointError, PeerFailure
from mpxla.session import Session

__all__ = ["Exchange", "ObjectExchange", "StoreExchange", "together"]

_CHANNEL = "checkpoint"
_POLL_S = 0.002
_SLOWEST_POLL_S = 0.05
T = TypeVar("T")


class Exchange(Protocol):
    """Gathers one value from every rank on every rank."""

    rank: int
    world_size: int

    def allgather(self, value: Any) -> list[Any]:
        """What every rank passed, by rank; every rank calls it. Values are JSON-able."""
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


class StoreExchange:
    """By a key-value store that all ranks share, from any thread.

    Every exchange has a prefix of its own. Others can write to the store too, so messages are
    sealed; `failure` tells of a rank that died.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        world_size: int,
        seal: Seal,
        failure: Callable[[], Any] = lambda: None,
    ):
        self.rank, self.world_size = rank, world_size
        self._store, self._prefix = store, prefix
        self._seal = seal
        self._failure = failure
        self._round = 0
        self.wait: Wait | None = None
        """What it waits for at the moment."""

    def allgather(self, value: Any) -> list[Any]:
        """See `Exchange`.

        Raises:
            MpxlaError: somebody else has written to the store.
            PeerFailure: a rank died meanwhile.
        """
        keys = [f"{self._prefix}/{self._round}/{rank}" for rank in range(self.world_size)]
        world = tuple(range(self.world_size))
        sealed = self._seal.wrap(json.dumps(value).encode(), _CHANNEL, world)
        self._store.set(keys[self.rank], sealed.hex())
        values = []
        for rank, key in enumerate(keys):
            found = bytes.fromhex(self._wait_for(key, rank).decode())
            values.append(json.loads(self._seal.unwrap(found, _CHANNEL, rank, world)))
        if self._round > 0:  # all ranks are in this round, so they have read the one before
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(f"{self._prefix}/{self._round - 1}/{self.rank}")
        self._round += 1
        return values

    def working(self) -> contextlib.AbstractContextManager[None]:
        """See `Exchange`; the table shows the main thread."""
        return contextlib.nullcontext()

    def _wait_for(self, key: str, rank: int) -> bytes:
        pause_s = _POLL_S
        self.wait = Wait((rank,), "its part of a checkpoint", time.monotonic())
        try:
            while not self._store.check([key]):  # blocking would keep others from the store
                failure = self._failure()
                if failure is not None:
                    text = failure.text if failure.text.endswith("\n") else f"{failure.text}. "
                    raise PeerFailure(f"{text}A checkpoint was being saved then.")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _SLOWEST_POLL_S)
            return self._store.get(key)
        finally:
            self.wait = None


def together(exchange: Exchange, what: str, action: Callable[[], T]) -> list[T]:
    """Runs an action on every rank; if it fails on any, all raise. Every rank must call it.

    Args:
        exchange: how outcomes travel.
        what: completes "... failed on rank 1".
        action: returns something JSON-able.

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
