"""Rank processes of the test process: started once, called many times, replaced when they fail.

Importing torch and torch_xla takes seconds, so the processes of a world are kept. A call that
fails or takes too long may leave a process in any state: its whole world is killed, and the next
call starts a new one. Output goes to files, of which an error shows the end.

The public functions and the texts of their errors are in `mpxla.tests.ranks.run`.
"""

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import getsourcefile
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from mpxla.comm.addresses import reserved_port
from mpxla.tests.ranks.launcher import (
    LATE_ENVIRON,
    RANK_ENVIRON,
    Process,
    fork_process,
    start_process,
    stop_zygotes,
    xla_flags_of_ranks,
)
from mpxla.tests.ranks.worker import Failed, Finished, FunctionRef, Request, Started

__all__ = ["Call", "Outcome", "RankPool", "borrow_pool", "discard_pool", "make_call"]

_START_TIMEOUT_S = 120.0
_GRACE_S = 5.0
_DUMP_S = 10.0
"""Longest time for stacks to be written."""
_QUIET_S = 0.3
"""When nothing has been added for this long, they are complete."""
_MAX_PROCESSES = 18
"""Kept between calls: a world each of one to four ranks, and nearly that on another backend."""


class Call(NamedTuple):
    """What every rank of a world is to run."""

    function: FunctionRef
    args: bytes
    script: str | None


def make_call(fn: Callable[..., Any], args: Sequence[Any]) -> Call:
    """Prepares a function for other processes.

    Raises:
        TypeError: It is no function of a module's top level, which is all that can be found again.
    """
    if not isinstance(fn, FunctionType) or "<" in fn.__qualname__:
        raise TypeError(
            f"{fn!r} cannot run on other processes: give a function that is defined at the top "
            f"level of a module, and its data as arguments."
        )
    path = getsourcefile(fn)
    assert path is not None
    reference = FunctionRef(fn.__module__, str(Path(path).resolve()), fn.__qualname__)
    data = pickle.dumps(tuple(args))
    script = getattr(sys.modules["__main__"], "__file__", None) if b"__main__" in data else None
    return Call(reference, data, script and str(Path(script).resolve()))


@dataclass
class Outcome:
    """How a call ended on one rank."""

    rank: int
    message: Finished | Failed | None = None
    exit_code: int | None = None
    """Of a process that ended during the call."""
    started_s: float | None = None
    ended_s: float | None = None
    stdout: str = ""
    stderr: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether the function returned."""
        return isinstance(self.message, Finished)

    @property
    def is_late(self) -> bool:
        """Whether it was still running when the parent gave up."""
        return self.message is None and self.exit_code is None


class RankProcess:
    """One process, started and ready to be called."""

    def __init__(self, rank: int, world_size: int, folder: Path, mode: str, env: Mapping[str, str]):
        """Starts the process; `wait_until_ready` has to follow.

        Args:
            rank: Its rank.
            world_size: Number of ranks.
            folder: For its output.
            mode: `pool` or `once`; see `worker.main`.
            env: Environment variables on top of this process's.
        """
        self.rank = rank
        self._files = [open(folder / f"{rank}.{name}", "w+b") for name in ("stdout", "stderr")]
        self._offsets = [0, 0]
        self.connection, theirs = Pipe()
        environ = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            **RANK_ENVIRON,
            "XLA_FLAGS": xla_flags_of_ranks(os.environ.get("XLA_FLAGS", "")),
            **env,
        }
        launch = fork_process if env.keys() <= LATE_ENVIRON else start_process
        with theirs:
            self.process: Process = launch(theirs.fileno(), mode, environ, self._files)

    def waitables(self) -> list[Any]:
        """What `multiprocessing.connection.wait` may wait for."""
        return [self.connection, self.process.waitable]

    def has_ended(self) -> bool:
        """Whether the process is gone, and nothing it has said is left to be read."""
        return self.process.poll() is not None

    def mark_output(self) -> None:
        """Makes `read_output` start at what is written from now on."""
        self._offsets = [os.fstat(file.fileno()).st_size for file in self._files]

    def read_output(self) -> tuple[str, str]:
        """Returns standard output and standard error since the mark."""
        texts = []
        for file, offset in zip(self._files, self._offsets, strict=True):
            size = os.fstat(file.fileno()).st_size - offset
            texts.append(os.pread(file.fileno(), size, offset).decode(errors="replace"))
        return texts[0], texts[1]

    def output_size(self) -> int:
        """Bytes that the process has written to standard error."""
        return os.fstat(self._files[1].fileno()).st_size

    def dump_stack(self) -> None:
        """Has the process write the stacks of its threads to its standard error."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Ends the process and everything it has started."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.release()
        self.connection.close()
        for file in self._files:
            file.close()


class RankPool:
    """The processes of one world."""

    def __init__(self, world_size: int, env: Mapping[str, str], mode: str = "pool") -> None:
        """Starts them and waits until they are ready."""
        self.folder = Path(tempfile.mkdtemp(prefix="mpxla-ranks-"))
        self._num_calls = 0
        self.ranks: list[RankProcess] = []
        try:
            for rank in range(world_size):
                self.ranks.append(RankProcess(rank, world_size, self.folder, mode, env))
            for rank in self.ranks:
                self._await_ready(rank)
        except BaseException:
            self.kill()
            raise

    def call(self, call: Call, timeout_s: float, grace_s: float | None = _GRACE_S) -> list[Outcome]:
        """Runs a function on every rank.

        Args:
            call: The function.
            timeout_s: Longest time for all of them.
            grace_s: How long the others may go on after the first has failed; None does not limit
                them.

        Returns:
            One outcome per rank, in the order of ranks.
        """
        self._num_calls += 1
        environ = {
            "MPXLA_RENDEZVOUS_FILE": str(self.folder / f"rendezvous-{self._num_calls}"),
            # For functions that need one; sessions of mpxla meet in the file.
            "MASTER_PORT": str(reserved_port("127.0.0.1")),
        }
        outcomes = [Outcome(rank.rank) for rank in self.ranks]
        for rank in self.ranks:
            rank.mark_output()
            with contextlib.suppress(BrokenPipeError):
                rank.connection.send(Request(*call, environ))
        self._collect(outcomes, time.monotonic() + timeout_s, grace_s)
        _dump_stacks([rank for rank in self.ranks if outcomes[rank.rank].is_late])
        for outcome, rank in zip(outcomes, self.ranks, strict=True):
            outcome.stdout, outcome.stderr = rank.read_output()
        return outcomes

    def kill(self) -> None:
        """Ends all processes."""
        for rank in self.ranks:
            rank.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _await_ready(self, rank: RankProcess) -> None:
        if rank.connection.poll(_START_TIMEOUT_S):
            with contextlib.suppress(EOFError):
                rank.connection.recv()
                return
        _, stderr = rank.read_output()
        raise RuntimeError(f"the process of rank {rank.rank} did not start:\n{stderr[-4000:]}")

    def _collect(self, outcomes: list[Outcome], deadline: float, grace_s: float | None) -> None:
        """Fills in outcomes as they come, until all are there or time is up."""
        is_once = grace_s is None
        pending = list(self.ranks)
        while pending and (left_s := deadline - time.monotonic()) > 0:
            wait([handle for rank in pending for handle in rank.waitables()], left_s)
            for rank in list(pending):
                outcome = outcomes[rank.rank]
                # Order matters: what a process said before it ended has to be read.
                has_ended = rank.has_ended()
                _read_messages(rank.connection, outcome)
                is_over = has_ended or (outcome.message is not None and not is_once)
                if not is_over:
                    continue
                pending.remove(rank)
                outcome.ended_s = time.time()
                outcome.exit_code = rank.process.poll()
                if grace_s is not None and not outcome.is_finished:
                    deadline = min(deadline, time.monotonic() + grace_s)


def _dump_stacks(ranks: Sequence[RankProcess]) -> None:
    """Has processes write their stacks, and waits until they have, however slow the machine is."""
    before = sizes = [rank.output_size() for rank in ranks]
    for rank in ranks:
        rank.dump_stack()
    deadline = time.monotonic() + _DUMP_S
    while ranks and time.monotonic() < deadline:
        time.sleep(_QUIET_S)
        earlier, sizes = sizes, [rank.output_size() for rank in ranks]
        if sizes == earlier and all(a > b for a, b in zip(sizes, before, strict=True)):
            break


def _read_messages(connection: Connection, outcome: Outcome) -> None:
    with contextlib.suppress(EOFError, ConnectionResetError):
        while connection.poll():
            message = connection.recv()
            if isinstance(message, Started):
                outcome.started_s = message.time_s
            else:
                outcome.message = message


_Key = tuple[int, tuple[tuple[str, str], ...]]
_pools: dict[_Key, RankPool] = {}


def borrow_pool(world_size: int, env: Mapping[str, str]) -> RankPool:
    """Returns the pool of a world, started if need be; the least recently used ones make room."""
    key = (world_size, tuple(sorted(env.items())))
    pool = _pools.pop(key, None)
    if pool is None:
        while _pools and sum(len(p.ranks) for p in _pools.values()) + world_size > _MAX_PROCESSES:
            _pools.pop(next(iter(_pools))).kill()
        pool = RankPool(world_size, env)
    _pools[key] = pool
    return pool


def discard_pool(pool: RankPool) -> None:
    """Ends a pool whose processes cannot be trusted any more."""
    for key in [key for key, other in _pools.items() if other is pool]:
        del _pools[key]
    pool.kill()


@atexit.register
def _discard_all() -> None:
    for pool in list(_pools.values()):
        discard_pool(pool)
    stop_zygotes()
