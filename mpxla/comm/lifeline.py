"""How every rank learns within about a second that another one failed.

Each rank keeps one TCP connection to rank 0 (`lifeline_server`). A rank that raises reports; a rank
that dies in any other way loses the connection; a rank that ends in order says bye. What rank 0's
server tells is put into the `FailureWatch` that every wait of mpxla looks at.

A wait outside mpxla (the user's own `dist.all_reduce`, a program on the device) cannot be
interrupted that way. So a watchdog ends the process when its main thread has not met the failure
`grace_s` seconds after it, and a process that is about to exit after a failure is not allowed to
hang in a destructor of the communication library: an error, never a hang.

Why not the `TCPStore` that exists anyway: it tells nobody when a client's connection ends, so that
a death would show only as a missed heartbeat, after as long as a healthy rank may be busy (tens of
seconds); and whoever reaches it can write to it. Here the kernel says at once that a process died.

This file knows no tensors and no transport. The store is used once, to find rank 0.
"""

import atexit
import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
import weakref
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from mpxla.comm.addresses import listening_address
from mpxla.comm.door import connect
from mpxla.comm.handle import Failure, FailureWatch
from mpxla.comm.lifeline_server import LifelineServer, decode, encode, set_keepalive
from mpxla.comm.pulse import Pulse
from mpxla.comm.stall import Progress
from mpxla.comm.store import await_note
from mpxla.comm.whereabouts import Place
from mpxla.errors import PeerFailure

__all__ = ["Lifeline"]

_ECHO_TIMEOUT_S = 2.0
_LINGER_S = 30.0
_EXIT_S = 20.0
_ADDRESS = "mpxla_lifeline/address"


class Lifeline(FailureWatch):
    """The watch of one process of a world of processes.

    Phases: *find* rank 0 through the store, *connect*, *watch* in a thread until `close`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        *,
        key: bytes,
        is_one_host: bool,
        grace_s: float = 10.0,
        connect_timeout_s: float = 300.0,
        stall_warning_s: float = 60.0,
        progress: Progress | None = None,
        stall_timeout_s: float = float("inf"),
    ) -> None:
        """Connects; to be called by every rank, and returns when all have.

        On one host, processes talk over the loopback interface, else over the one that leads to a
        TCPStore's host. A process is ended if its main thread is unaware of a failure for
        `grace_s`. If a rank gives no sign of life for `stall_timeout_s`, or one waits so long for
        others that do not move, the job ends with a table of what all are doing.

        Raises:
            PeerFailure: Ranks did not connect in time, or one failed meanwhile.
        """
        super().__init__(rank, world_size, stall_warning_s=stall_warning_s)
        self._grace_s = grace_s
        self._progress = progress or Progress()
        self.place = self._progress.place
        self.place_of = self._place_of
        self._stall_timeout_s = stall_timeout_s
        self._pulse: Pulse | None = None
        self._is_abandoned = False  # by a rank whose process does not even end
        self._sending = threading.Lock()
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._is_ready = False  # all ranks are connected
        self._is_cut = False
        self._server: LifelineServer | None = None
        self._connection: socket.socket | None = None
        self._key = key
        _open_lifelines.add(self)
        try:
            address = self._find(store, is_one_host, connect_timeout_s)
            self._connection = self._connect(address, connect_timeout_s)
            if stall_timeout_s != float("inf"):
                self._pulse = self._start_pulse()
            threading.Thread(target=self._watch, name="mpxla-lifeline", daemon=True).start()
            self._await_others(connect_timeout_s)
        except BaseException:
            self._release(linger_s=0.0)
            raise
        self.on_failure(self._start_watchdog)
        atexit.register(self._end_even_if_stuck)

    @property
    def address(self) -> str:
        """The network address of this process by which it reaches the others."""
        assert self._connection is not None
        return str(self._connection.getsockname()[0])

    def report(self, where: str, error: BaseException) -> None:
        """Tells all ranks that this one cannot go on; see `FailureWatch.report`.

        Returns when rank 0 has taken it in, so that the process may end right after.
        """
        if os.getpid() == self._pid:
            super().report(where, error)

    def close(self, linger_s: float = _LINGER_S) -> None:
        """Leaves in order. After a failure it only ends the watching.

        Args:
            linger_s: How long rank 0 stays for the ranks that are not done yet, so that they keep
                hearing of each other. It stays longer for one that has fallen silent.

        Raises:
            PeerFailure: A rank fell silent, and nothing has been raised for that yet.
        """
        if self._connection is None or self._closed.is_set() or os.getpid() != self._pid:
            return
        if self.told_failure() is None:
            self._take_leave()
        self._release(linger_s)
        if self.failure is None:
            atexit.unregister(self._end_even_if_stuck)
        elif self._is_abandoned and not self.noticed.is_set():
            self.check()

    def _take_leave(self) -> None:
        """Says bye, and waits until rank 0 has heard it, which it does wherever its script is."""
        timeout_s = _ECHO_TIMEOUT_S if self._pulse is None else None
        self._tell(encode(type="bye"))
        with self.changed:
            self.changed.wait_for(
                lambda: self.rank in self._left or self._is_cut or self.failure is not None,
                timeout_s,
            )

    def _release(self, linger_s: float) -> None:
        self._closed.set()
        if self._pulse is not None:
            self._pulse.stop()
        if self._server is not None:
            self._server.stop(0.0 if self.failure is not None else linger_s)
            if self._server.stall is not None:
                self._is_abandoned = True
                self.set_failure(self._server.stall)
        _open_lifelines.discard(self)
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _start_pulse(self) -> Pulse:
        return Pulse(
            self.rank,
            self.world_size,
            self._progress,
            self.current_wait,
            self._stall_timeout_s,
            tell=lambda row: self._tell(encode(type="beat", row=row)),
            fail=self._fail_alone,
        )

    def _place_of(self, rank: int) -> Place:
        row = {} if self._pulse is None else self._pulse.rows.get(rank, {})
        return Place(row.get("call", ""), row.get("where", ""))

    def _fail_alone(self, failure: Failure) -> None:
        """A failure that rank 0 may be unable to pass on: what it can do is told all the same."""
        if not self._closed.is_set():
            if failure.rank != self.rank:
                self._is_abandoned = True
            else:
                self._tell(encode(type="report", text=failure.text))
            self.set_failure(failure)

    def _moved(self) -> None:
        self._progress.move()

    def _find(self, store: Store, is_one_host: bool, timeout_s: float) -> tuple[str, int]:
        """Publishes rank 0's address in the store, or reads it there."""
        if self.rank == 0:
            host = listening_address(is_one_host, _store_host(store))
            self._server = LifelineServer(host, self.world_size, self._key, self._stall_timeout_s)
            store.set(_ADDRESS, f"{host} {self._server.port}")
        host, port = await_note(store, _ADDRESS, self.rank, 0, timeout_s).split()
        return host, int(port)

    def _connect(self, address: tuple[str, int], timeout_s: float) -> socket.socket:
        advice = (
            "Set MASTER_ADDR to an address of rank 0 that all hosts can reach, and allow TCP "
            "connections between them."
        )
        connection = connect(address, self.rank, 0, self._key, advice, timeout_s)
        set_keepalive(connection)
        return connection

    def _await_others(self, timeout_s: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self._is_ready or self.failure is not None, timeout_s)
        self.check()
        if not self._is_ready:
            raise PeerFailure(
                f"rank {self.rank} waited {timeout_s:g} s for all {self.world_size} ranks to "
                f"connect to rank 0. Start the same script on all ranks."
            )

    def _watch(self) -> None:
        """Takes in what rank 0 tells, until the connection ends."""
        assert self._connection is not None
        try:
            self._listen(self._connection)
        except Exception as error:  # nobody would hear of failures any more
            self._fail_alone(
                Failure(
                    self.rank,
                    f"rank {self.rank} cannot read what rank 0 says on its lifeline "
                    f"({type(error).__name__}: {error}). Install the same version of mpxla on "
                    f"every host",
                )
            )
        if not self._closed.is_set() and not self.has_left(0) and self.failure is None:
            self.set_failure(
                Failure(0, "rank 0 died: its process ended without a report (lifeline lost)")
            )
        with self.changed:
            self._is_cut = True
            self.changed.notify_all()
        self._connection.close()

    def _listen(self, connection: socket.socket) -> None:
        buffer = bytearray()
        while True:
            try:
                data = connection.recv(65536)
            except OSError:
                return
            if not data:
                return
            buffer += data
            for message in decode(buffer):
                self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["type"] == "failure":
            self.set_failure(Failure(int(message["rank"]), str(message["text"])))
        elif message["type"] == "bye":
            self.set_left(int(message["rank"]))
        elif message["type"] == "pulse":
            if self._pulse is not None:
                self._pulse.hear(message["rows"])
        elif message["type"] == "ready":
            with self.changed:
                self._is_ready = True
                self.changed.notify_all()
        else:
            raise ValueError(f"an unknown message {message['type']!r}")

    def _spread(self, failure: Failure) -> None:
        if self._connection is None or not self._tell(encode(type="report", text=failure.text)):
            self.set_failure(failure)
            return
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None, _ECHO_TIMEOUT_S)
        self.set_failure(failure)

    def _tell(self, data: bytes) -> bool:
        assert self._connection is not None
        try:
            with self._sending:
                self._connection.sendall(data)
        except OSError:
            return False
        return True

    def _start_watchdog(self, failure: Failure) -> None:
        threading.Thread(
            target=self._end_if_unnoticed, args=(failure,), name="mpxla-watchdog", daemon=True
        ).start()

    def _end_if_unnoticed(self, failure: Failure) -> None:
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline:
            if self.noticed.wait(min(0.2, self._grace_s)) or self._closed.is_set():
                return
        text = (
            f"\n{PeerFailure.__module__}.{PeerFailure.__name__}: {failure.text}. Rank {self.rank} "
            f"was busy outside mpxla for {self._grace_s:g} s after that, where it cannot be "
            f"interrupted; its process ends now. Where it was:\n"
        )
        # Somebody may hold the lock of a stream, and this thread must not wait for it.
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)
        flush.start()
        flush.join(1.0)
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
            faulthandler.dump_traceback(file=2)
        os._exit(1)

    def _end_even_if_stuck(self) -> None:
        """At exit after a failure: destructors may wait for peers that are gone."""
        if self.failure is not None and os.getpid() == self._pid:
            faulthandler.dump_traceback_later(_EXIT_S, exit=True, file=2)

    def close_in_child(self) -> None:
        """Drops the sockets in a forked child, so that they end with the process they belong to."""
        sockets = self._server.sockets() if self._server is not None else []
        for connection in [self._connection, *sockets]:
            if connection is not None:
                connection.close()


_open_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for lifeline in list(_open_lifelines):
        lifeline.close_in_child()


# Workers of data loaders are forked: a copy of the socket in them would outlive a killed rank and
# hide its death.
os.register_at_fork(after_in_child=_close_all_in_child)


def _store_host(store: Store) -> str | None:
    """The address of rank 0's host, if the store knows one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)  # of a TCPStore
