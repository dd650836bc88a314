"""A communication that is under way, and the watch that ends the wait for it when a rank fails.

Every blocking wait of mpxla is `Handle.result`. All handles of a process share the condition of one
`FailureWatch`, so a waiting thread sleeps until its handle is complete, a rank has failed or a rank
it depends on has left; it does not poll.

This file knows neither sockets nor tensors: `lifeline` brings the news of other processes, and a
world of one process needs none.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, NamedTuple, TypeVar, cast

from mpxla.comm.whereabouts import Place
from mpxla.errors import MpxlaError, PeerFailure
from mpxla.log import get_logger

__all__ = ["Failure", "FailureWatch", "Handle", "Wait"]

_MAX_ERROR_CHARS = 4000

T = TypeVar("T")


class Failure(NamedTuple):
    """Why the job cannot go on. The first one stays: it is the cause, later ones follow from it."""

    rank: int
    """The rank that failed."""
    text: str
    """What happened to it: `rank 2 raised ValueError in stage 1: ...`."""


class Wait(NamedTuple):
    """What a thread waits for."""

    awaited: tuple[int, ...]
    """Ranks that have to come; empty if that is not known."""
    what: str
    """The communication in words."""
    since: float
    """Monotonic time."""


class Handle(Generic[T]):
    """One communication in the background; complete when it has a result or an error."""

    def __init__(
        self,
        watch: "FailureWatch",
        what: str,
        peers: Iterable[int] = (),
        awaited: Iterable[int] | None = None,
    ) -> None:
        """Makes a handle that is not complete, of a communication as in `values from rank 2`.

        It cannot complete without its peers. Those that are awaited have to come to it, and may
        have left after that; by default they are the peers.
        """
        self._watch = watch
        self._is_done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self.what = what
        self.peers = tuple(peers)
        self.awaited = self.peers if awaited is None else tuple(awaited)
        self.wait: Wait | None = None
        """Set when the watch's thread begins to wait for it, perhaps with pauses."""

    def done(self) -> bool:
        """Returns whether `result` would return, or raise the handle's own error, at once."""
        return self._is_done

    def result(self, timeout_s: float | None = None) -> T:
        """Waits until the communication is complete, as long as all needed ranks live.

        Raises:
            PeerFailure: A rank failed, or a needed rank left, before this was complete.
            TimeoutError: `timeout_s` passed.
        """
        if not self._is_done:
            self._watch.wait_for(self, timeout_s)
        if self._error is not None:
            self._watch.notice(self._error)
            raise self._error
        return cast(T, self._value)

    def set_result(self, value: T) -> None:
        """Completes the handle; called once, by the thread that communicates."""
        with self._watch.changed:
            self._value = value
            self._is_done = True
            self._watch.changed.notify_all()

    def set_error(self, error: BaseException) -> None:
        """Completes the handle with an error that `result` raises."""
        with self._watch.changed:
            self._error = error
            self._is_done = True
            self._watch.changed.notify_all()


class FailureWatch:
    """What this process knows about the life of the others.

    On its own it serves one process; `Lifeline` feeds it with the news of the other processes.
    """

    def __init__(
        self,
        rank: int,
        world_size: int = 1,
        *,
        stall_warning_s: float = 60.0,
        settle_s: float = 10.0,
    ) -> None:
        """Starts with everybody alive.

        A wait as long as `stall_warning_s` is logged, again after every doubling. For `settle_s` a
        message of a rank that has left may still be under way.
        """
        self.rank = rank
        self.world_size = world_size
        self.changed = threading.Condition(threading.RLock())
        self._telling = threading.RLock()  # held by a thread that fails a handle, see `fail`
        self._stall_warning_s = stall_warning_s
        self._settle_s = settle_s
        self.failure: Failure | None = None
        """The first one of any rank."""
        self._left: dict[int, float] = {}
        self._callbacks: list[Callable[[Failure], Any]] = []
        self._owner = threading.current_thread()
        self._waiting: Wait | None = None  # what the owner waits for
        self._is_joining = False
        self.background: Callable[[], Wait | None] = lambda: None
        """What a thread waits for that the owner leaves alone, unless it is `joining`."""
        self.noticed = threading.Event()
        """Set once the thread that made the watch knows of the failure."""
        self.place: Callable[[], Place] = lambda: Place("", "")
        """Where the owner is, in the user's words."""
        self.place_of: Callable[[int], Place] = lambda rank: Place("", "")
        """Where another rank is, as far as that is known here."""
        self.is_closing = False
        """Whether this process is breaking its own connections."""

    def told_failure(self) -> Failure | None:
        """`failure`, after all ranks have been told of what a handle of this one has failed by."""
        with self._telling:
            return self.failure

    def has_left(self, rank: int) -> bool:
        """Returns whether a rank has ended in order."""
        return rank in self._left

    def on_failure(self, callback: Callable[[Failure], Any]) -> None:
        """Has `callback` called with the failure, once, from a background thread.

        Called at once if there is a failure already.
        """
        with self.changed:
            failure = self.failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    def check(self) -> None:
        """Raises PeerFailure if any rank has failed. Cheap: for loops that wait for nothing."""
        if self.failure is not None:
            raise self._peer_failure(None)

    def report(self, where: str, error: BaseException) -> None:
        """Tells all ranks that this one cannot go on. The first report of any rank stays.

        `where` is what this rank was doing, as in `stage 1, microbatch 3`; it may be empty.
        """
        if threading.current_thread() is self._owner:
            self.noticed.set()
        place = f" in {where}" if where else ""
        text = f"rank {self.rank} raised {type(error).__name__}{place}: {error}"
        if len(text) > _MAX_ERROR_CHARS:
            text = f"{text[:_MAX_ERROR_CHARS]} ... ({len(text)} characters)"
        if self.failure is None:
            self._spread(Failure(self.rank, text))

    def fail(self, handle: Handle[Any], where: str, error: BaseException) -> None:
        """Completes a handle with an error, and tells all ranks of it.

        Whoever waits gets the error at once and may leave the job; it does not say so before the
        others have heard why, or they would take the job for a script that ended early. `where` is
        that of `report`.
        """
        with self._telling:
            handle.set_error(error)
            self.report(where, error)

    def explain(self, error: BaseException, peers: Iterable[int], what: str) -> PeerFailure:
        """Finds out why a connection broke; called with the error of the broken connection.

        A process that dies breaks its connections at the same time as it loses its lifeline, so
        the news of its death may be a moment late: this waits up to two seconds for it.

        Returns:
            The error to raise, naming the rank that failed or left.
        """
        others = [peer for peer in peers if peer != self.rank]
        if self.is_closing and self.failure is None:
            return PeerFailure(f"rank {self.rank} shut mpxla down during {what}.")
        with self.changed:
            self.changed.wait_for(
                lambda: self.failure is not None or any(peer in self._left for peer in others),
                timeout=2.0,
            )
            if self.failure is not None:
                return self._peer_failure(what)
            for peer in others:
                if peer in self._left:
                    return self._left_failure(peer, what)
        named = ", ".join(map(str, others))
        lost = PeerFailure(
            f"rank {self.rank} lost its connection to rank {named} during {what}, and no rank has "
            f"reported why: {error}. Look at the output of rank {named} and at the network."
        )
        self.report(what, lost)
        return lost

    def account_for(self, error: Exception, peers: Iterable[int], what: str) -> BaseException:
        """What a thread that communicates makes of any error, so that nobody waits in vain.

        Returns:
            The error for whoever waits. All ranks have been told of it.
        """
        if isinstance(error, PeerFailure):
            return error
        is_ours = isinstance(error, MpxlaError)
        if isinstance(error, RuntimeError | ValueError | OSError) and not is_ours:
            return self.explain(error, peers, what)
        self.report(what, error)
        return error

    def wait_for(self, handle: Handle[Any], timeout_s: float | None) -> None:
        """Blocks until `handle` is complete; see `Handle.result`."""
        if threading.current_thread() is not self._owner:
            self._wait_for(handle, timeout_s)
            return
        if handle.wait is None:
            handle.wait = Wait(handle.awaited, handle.what, time.monotonic())
        self._waiting = handle.wait
        try:
            self._wait_for(handle, timeout_s)
        finally:
            self._waiting = None
            if handle.done():
                self._moved()

    def _wait_for(self, handle: Handle[Any], timeout_s: float | None) -> None:
        start = time.monotonic()
        next_warning = start + self._stall_warning_s
        deadline = float("inf") if timeout_s is None else start + timeout_s
        with self.changed:
            while not handle.done():
                now = time.monotonic()
                if self.failure is not None:
                    raise self._peer_failure(handle.what)
                # When, and because of whom, the wait has no hope left.
                left = [
                    (self._left[p] + self._settle_s, p) for p in handle.peers if p in self._left
                ]
                settled = min(left, default=(float("inf"), -1))
                if now >= settled[0]:
                    raise self._left_failure(settled[1], handle.what)
                if now >= deadline:
                    raise TimeoutError(
                        f"rank {self.rank} waited {timeout_s} s for {handle.what}. Nobody failed: "
                        f"look at what rank {', '.join(map(str, handle.peers))} is doing."
                    )
                if now >= next_warning:
                    self._warn_of_stall(handle, now - start)
                    next_warning = now + (now - start)
                wake = min(settled[0], deadline, next_warning) - now
                self.changed.wait(min(wake, threading.TIMEOUT_MAX))

    def current_wait(self) -> Wait | None:
        """What the owner waits for, itself or by the thread that it waits for."""
        # At the end of the program, Python waits for its threads.
        if self._is_joining or not threading.main_thread().is_alive():
            return self._waiting or self.background()
        return self._waiting

    @contextlib.contextmanager
    def joining(self) -> Generator[None]:
        """While the owner waits for the thread in the background: their waits are one."""
        self._is_joining = True
        try:
            yield
        finally:
            self._is_joining = False
            self._moved()

    def _moved(self) -> None:
        """A wait of the owner has ended well."""

    def notice(self, error: BaseException) -> None:
        """Notes that an error reaches the caller, so that the process need not be ended for it."""
        is_owner = threading.current_thread() is self._owner
        if is_owner and self.failure is not None and isinstance(error, PeerFailure):
            self.noticed.set()

    def set_failure(self, failure: Failure) -> None:
        """Takes in the news that a rank failed; the first stays."""
        with self.changed:
            if self.failure is not None:
                return
            self.failure = failure
            callbacks, self._callbacks = self._callbacks, []
            self.changed.notify_all()
        for callback in callbacks:
            callback(failure)

    def set_left(self, rank: int) -> None:
        """Takes in the news that a rank ended in order."""
        with self.changed:
            self._left.setdefault(rank, time.monotonic())
            self.changed.notify_all()

    def _spread(self, failure: Failure) -> None:
        """Makes this rank's failure known, here and elsewhere."""
        self.set_failure(failure)

    def _peer_failure(self, what: str | None) -> PeerFailure:
        assert self.failure is not None
        waited = f" (rank {self.rank} was waiting {self._words(what)})" if what else ""
        text = self.failure.text.removesuffix(".")
        error = PeerFailure(
            f"{text}{waited}. Look at the output of rank {self.failure.rank} for the cause."
        )
        if self.failure.text.startswith(f"rank {self.failure.rank} raised "):
            error.raised_by = self.failure.rank
        self.notice(error)
        return error

    def _left_failure(self, peer: int, what: str) -> PeerFailure:
        error = PeerFailure(
            f"rank {peer} finished (left) while rank {self.rank} waited {self._words(what)}. Call "
            f"the same steps and communications on all ranks, as often on each."
        )
        self.notice(error)
        return error

    def _words(self, what: str) -> str:
        """A wait in words: `for WHAT`, or `in CALL OF THE USER at LINE for WHAT`."""
        is_owner = threading.current_thread() is self._owner
        place = self.place() if is_owner else Place("", "")
        inside = f"in {place} " if place.call else ""
        return f"{inside}for {place.waits_for(what)}"

    def _warn_of_stall(self, handle: Handle[Any], waited_s: float) -> None:
        named = ", ".join(map(str, handle.peers)) or "unknown"
        places = {peer: self.place_of(peer) for peer in handle.peers}
        known = [f" Rank {peer} is in {place}." for peer, place in places.items() if place.line]
        get_logger().warning(
            "rank %d has waited %.0f s %s; the ranks it needs (%s) are alive but have not come "
            "to it.%s",
            self.rank,
            waited_s,
            self._words(handle.what),
            named,
            "".join(known) or " Look at what they are doing.",
        )
