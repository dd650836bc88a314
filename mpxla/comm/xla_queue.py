"""The one thread of a process that starts the `xla` transport's programs, in the order of calls.

Programs are lowered by the calling thread, because the tracer is not made for several at a time,
and loaded and executed by this queue's thread. What does so is a *runner*,
which the backend of the device opens.

This file must not know what programs are for, nor torch_xla.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from mpxla.comm.handle import FailureWatch, Handle
from mpxla.comm.transport import Group
from mpxla.comm.xla_programs import GraphProgram, Program
from mpxla.errors import MpxlaError

__all__ = ["Job", "ProgramQueue", "Runner"]

_ABORT_S = 2.0


class Runner(Protocol):
    """Executes programs on the device of this process."""

    def meet(self, ranks: Group, what: str, purpose: str, text: str) -> None:
        """Waits for all ranks to come to the same communication, if they can tell."""
        ...

    def lower(self, program: Program | GraphProgram) -> Any:
        """Makes what `load` takes. Runs in the calling thread."""
        ...

    def fetch(self, operand: torch.Tensor) -> torch.Tensor:
        """Brings an operand to where `execute` takes it; may wait until it is computed."""
        ...

    def load(self, lowered: Any) -> Any:
        """Makes what `execute` takes. May wait until all members of the mesh load it."""
        ...

    def execute(
        self, loaded: Any, operands: Sequence[torch.Tensor | None], to_host: bool
    ) -> list[torch.Tensor]:
        """Runs a program; an operand of None is zeros."""
        ...

    def close(self) -> None:
        """Disconnects. Every rank calls it, after its last execution."""
        ...


class Job(NamedTuple):
    """One communication: *fetch* operands, *load*, *meet* the others, *execute*, *finish*."""

    handle: Handle[Any]
    ranks: Group
    """Who takes part."""
    purpose: str
    """What this rank does, for its own error: completes "rank 3 ..."."""
    text: str
    """What all take part in, in words that are equal on all ranks."""
    program: Program | GraphProgram | None
    """None if there is nothing to move."""
    operands: Sequence[torch.Tensor | None]
    """Tensors anywhere; None stands for zeros."""
    finish: Callable[[list[torch.Tensor]], Any]
    """Makes the handle's result out of the program's."""
    to_host: bool
    """Whether results are read back from the device."""


class _Loading(NamedTuple):
    """Programs to load together."""

    handle: Handle[None]
    ranks: Group
    text: str
    programs: list[Program]


class ProgramQueue:
    """Communications of one process, one after the other."""

    def __init__(self, rank: int, watch: FailureWatch, runner: Runner) -> None:
        """Starts the thread.

        Args:
            rank: Global rank of this process.
            watch: Learns of operands that cannot be computed, and explains broken connections.
            runner: Executes programs; closed by `close`.
        """
        self._rank = rank
        self._watch = watch
        self._runner = runner
        self._small: dict[Program, dict[str, Any]] = {}
        self._graphs: weakref.WeakSet[GraphProgram] = weakref.WeakSet()
        self._is_closed = False
        self._queue: SimpleQueue[Job | _Loading | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mpxla-xla", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Handle[Any]:
        """Queues a communication."""
        assert not self._is_closed, "the transport is closed"
        if job.program is not None:
            self._lower(job.program)
        self._queue.put(job)
        return job.handle

    def load(self, programs: Sequence[Program], ranks: Group) -> Handle[None]:
        """Queues the loading of programs, in the order given. All ranks pass the same.

        Those that this rank is no member of are left out here.
        """
        here = [program for program in programs if self._rank in program.mesh.members]
        for program in here:
            self._lower(program)
        text = f"the loading of {'; '.join(map(str, programs)) or 'nothing'}"
        others = [rank for rank in ranks if rank != self._rank]
        handle: Handle[None] = Handle(self._watch, f"the loading of {len(here)} programs", others)
        self._queue.put(_Loading(handle, ranks, text, here))
        return handle

    def close(self, timeout_s: float) -> None:
        """Ends the thread after what is queued, then closes the runner.

        After a failure, nothing is waited for.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            if self._watch.failure is not None:
                self._thread.join(_ABORT_S)
                break
            self._thread.join(0.01)
        self._forget()
        if not self._thread.is_alive():
            with contextlib.suppress(RuntimeError, TimeoutError):  # the others are gone already
                self._runner.close()

    def _forget(self) -> None:
        """Lets go of what is loaded, which must not outlive the runner."""
        self._small.clear()
        for program in self._graphs:
            program.made.clear()

    def _made(self, program: Program | GraphProgram) -> dict[str, Any]:
        """What has been made of a program: `lowered`, and in its place `loaded`."""
        if not isinstance(program, GraphProgram):
            return self._small.setdefault(program, {})
        self._graphs.add(program)
        return program.made

    def _lower(self, program: Program | GraphProgram) -> None:
        made = self._made(program)
        if not made:
            made["lowered"] = self._runner.lower(program)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if isinstance(job, _Loading):
                self._load_together(job)
            else:
                self._do(job)
            del job  # its tensors are not needed while the thread waits for the next one

    def _do(self, job: Job) -> None:
        try:
            operands = [None if t is None else self._runner.fetch(t) for t in job.operands]
        except BaseException as error:  # the other ranks wait for this one: they have to be told
            self._watch.fail(job.handle, f"computing the operand of {job.handle.what}", error)
            return
        try:
            if job.program is not None:
                self._load(job.program)
            self._runner.meet(job.ranks, job.handle.what, job.purpose, job.text)
            job.handle.set_result(job.finish(self._execute(job, operands)))
        except Exception as error:  # the thread goes on; the caller gets it
            job.handle.set_error(self._explained(error, job.handle))

    def _execute(self, job: Job, operands: list[torch.Tensor | None]) -> list[torch.Tensor]:
        if job.program is None:
            return []
        loaded = self._made(job.program)["loaded"]
        return self._runner.execute(loaded, operands, job.to_host)

    def _load_together(self, job: _Loading) -> None:
        try:
            self._runner.meet(job.ranks, job.handle.what, f"came to {job.text}", job.text)
            for program in job.programs:
                self._load(program)
            job.handle.set_result(None)
        except Exception as error:  # the thread goes on; the caller gets it
            job.handle.set_error(self._explained(error, job.handle))

    def _load(self, program: Program | GraphProgram) -> None:
        made = self._made(program)
        if "loaded" not in made:
            made["loaded"] = self._runner.load(made["lowered"])
            del made["lowered"]  # after that: the calling thread looks whether anything is there

    def _explained(self, error: Exception, handle: Handle[Any]) -> BaseException:
        if isinstance(error, MpxlaError):
            return error
        return self._watch.account_for(error, handle.peers, handle.what)
