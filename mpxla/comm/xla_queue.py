"""The one thread of a process that starts the `xla` transport's programs, in the order of calls.

Programs are lowered by the calling thread, because the tracer is not made for several at a time,
and loaded and executed by this queue's thread. What does so is a *runner*,
which the backend of the device opens.

This file must not know what programs are for, nor torch_xla.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from mpxla.comm.handle import FailureWatch, Handle
from mpxla.comm.transport import Group
from mpxla.comm.worker import Worker
from mpxla.comm.xla_programs import GraphProgram, Program
from mpxla.errors import MpxlaError
from mpxla.log import warn_once

__all__ = ["MAX_PROGRAMS", "Job", "ProgramQueue", "Runner"]

MAX_PROGRAMS = 1024
"""Of messages and collectives. The plans that a pipeline keeps use some hundreds; there are more
where shapes change in each step."""
_ABORT_S = 2.0


class Runner(Protocol):
    """Executes programs on the device of this process.

    Attributes:
        loads_alone: whether `load` does without the other members of the mesh.
    """

    @property
    def loads_alone(self) -> bool: ...  # noqa: D102

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


_Made = dict[str, Any]
"""What has been made of a program: `lowered`, and in its place `loaded`."""


class ProgramQueue:
    """Communications of one process, one after the other."""

    def __init__(self, rank: int, watch: FailureWatch, runner: Runner) -> None:
        """Takes over the runner, which `close` closes."""
        self._rank = rank
        self._watch = watch
        self._runner = runner
        self._small: dict[Program, _Made] = {}
        """The last used is the last."""
        self._graphs: weakref.WeakSet[GraphProgram] = weakref.WeakSet()
        self._is_closed = False
        self._worker = Worker("mpxla-xla")

    def submit(self, job: Job) -> Handle[Any]:
        """Queues a communication."""
        assert not self._is_closed, "the transport is closed"
        made = {} if job.program is None else self._lowered(job.program)
        self._worker.put(partial(self._do, job, made))
        return job.handle

    def load(self, programs: Sequence[Program], ranks: Group) -> Handle[None]:
        """Queues the loading of programs, in the order given. All ranks pass the same.

        Those that this rank is no member of are left out here.
        """
        here = [program for program in programs if self._rank in program.mesh.members]
        made = [self._lowered(program) for program in here]
        text = f"the loading of {'; '.join(map(str, programs)) or 'nothing'}"
        others = [rank for rank in ranks if rank != self._rank]
        handle: Handle[None] = Handle(self._watch, f"the loading of {len(here)} programs", others)
        self._worker.put(partial(self._load_together, handle, ranks, text, made))
        return handle

    def close(self, timeout_s: float) -> None:
        """Ends the thread after what is queued, then closes the runner.

        After a failure, nothing is waited for.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._worker.finish()
        thread, deadline = self._worker.thread, time.monotonic() + timeout_s
        while thread is not None and thread.is_alive() and time.monotonic() < deadline:
            if self._watch.failure is not None:
                thread.join(_ABORT_S)
                break
            thread.join(0.01)
        self._forget()
        if thread is None or not thread.is_alive():
            with contextlib.suppress(RuntimeError, TimeoutError):  # the others are gone already
                self._runner.close()

    def _forget(self) -> None:
        """Lets go of what is loaded, which must not outlive the runner."""
        self._small.clear()
        for program in self._graphs:
            program.made.clear()

    def _lowered(self, program: Program | GraphProgram) -> _Made:
        """What has been made of a program, or will be after this."""
        if isinstance(program, GraphProgram):
            self._graphs.add(program)
            made = program.made
        else:
            made = self._small[program] = self._small.pop(program, {})
        if not made:
            made["lowered"] = self._runner.lower(program)
        # Where members load together, one of them must not have to load again by itself.
        if len(self._small) > MAX_PROGRAMS and self._runner.loads_alone:
            self._small.pop(next(iter(self._small)), None)
            warn_once(
                "message programs are forgotten",
                f"more than {MAX_PROGRAMS} programs of messages and collectives were compiled, the "
                f"last one for {program}; those that were not used for longest are forgotten. "
                f"Give steps fewer different shapes, such as lengths that are padded.",
            )
        return made

    def _do(self, job: Job, made: _Made) -> None:
        try:
            operands = [None if t is None else self._runner.fetch(t) for t in job.operands]
        except BaseException as error:  # the other ranks wait for this one: they have to be told
            self._watch.fail(job.handle, f"computing the operand of {job.handle.what}", error)
            return
        try:
            if job.program is not None:
                self._load(made)
            self._runner.meet(job.ranks, job.handle.what, job.purpose, job.text)
            results = list[torch.Tensor]()
            if job.program is not None:
                results = self._runner.execute(made["loaded"], operands, job.to_host)
            job.handle.set_result(job.finish(results))
        except Exception as error:  # the thread goes on; the caller gets it
            job.handle.set_error(self._explained(error, job.handle))

    def _load_together(
        self, handle: Handle[None], ranks: Group, text: str, programs: list[_Made]
    ) -> None:
        try:
            self._runner.meet(ranks, handle.what, f"came to {text}", text)
            for made in programs:
                self._load(made)
            handle.set_result(None)
        except Exception as error:  # the thread goes on; the caller gets it
            handle.set_error(self._explained(error, handle))

    def _load(self, made: _Made) -> None:
        if "loaded" not in made:
            made["loaded"] = self._runner.load(made["lowered"])
            del made["lowered"]  # after that: the calling thread looks whether anything is there

    def _explained(self, error: Exception, handle: Handle[Any]) -> BaseException:
        if isinstance(error, MpxlaError):
            return error
        return self._watch.account_for(error, handle.peers, handle.what)
