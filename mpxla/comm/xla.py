"""Communication by collectives inside XLA programs, each a small program of its own.

Data goes by programs: collectives, and the messages between stages (*streams*, the channels named
in `STREAMS`). Everything else goes by the host transport beside it: messages on other channels
(announcements, results, objects), whose sizes the receiver does not know beforehand, and which must
not depend on what programs wait for. So ranks exchange shapes on the host before the first program
that has them, and never inside the steady state of a step.

A program is a rendezvous of its members. One thread per process starts them one after the other, in
the order in which this rank called. Callers must therefore call in orders that fit each other:

    - a send and its receive meet in place, as do the members of a collective; nothing overtakes;
    - the orders of all ranks must have a common order. Schedules have one: the simulator proves it,
      with the same semantics, and replicas run equal lists (`tests/comm/recorder.py` proves it).

Programs are loaded all at once by `prepare`, in one order on all ranks, or at their first use, by
their members together.

This file must not know stages, schedules or the session, nor torch_xla.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpxla.comm.codec import DATA
from mpxla.comm.handle import Handle
from mpxla.comm.mesh import Meshes
from mpxla.comm.objects import Objects
from mpxla.comm.packing import Spec, describe
from mpxla.comm.transport import (
    Group,
    Transport,
    Use,
    check_group,
    check_parts,
    check_peer,
    check_source,
    check_summable,
    not_made,
)
from mpxla.comm.xla_programs import GraphProgram, Operand, Program, operand_of
from mpxla.comm.xla_queue import Job, ProgramQueue, Runner

__all__ = ["STREAMS", "XlaTransport"]

STREAMS = frozenset({"forward", "backward"})
"""Channels whose messages are programs. Both ends know the specs of all their messages."""


class XlaTransport:
    """The transport of one process of a world; see `transport.Transport`."""

    def __init__(
        self,
        host: Transport,
        runner: Runner,
        pipelines: Sequence[Group] = (),
        spec_of: Callable[[Any], Spec] | None = None,
    ) -> None:
        """Starts the thread, and warms up by a sum over all ranks. Every rank constructs it.

        The host transport carries what is not data, and belongs to this one from here on. Pipelines
        are equal on all ranks. `spec_of` is for values of the backend that are no tensors of
        PyTorch.
        """
        self._spec_of_buffer = spec_of
        self._fetch = runner.fetch
        self.host = host
        self._program_bytes = 0
        self.rank = host.rank
        self.world_size = host.world_size
        self.watch = host.watch
        self.seal = host.seal
        self._world: Group = tuple(range(host.world_size))
        self._meshes = Meshes(host.world_size, pipelines)
        self._objects = Objects(host, DATA)
        self._made = {self._world, (self.rank,)}
        self._queue = ProgramQueue(host.rank, host.watch, runner)
        # Communicators of some devices have to be set up by all ranks before a subset uses any.
        self.barrier(self._world).result()

    @property
    def bytes_sent(self) -> int:
        """By programs and by the host transport beside them."""
        return self._program_bytes + self.host.bytes_sent

    def _spec_of(self, value: Any) -> Spec:
        if self._spec_of_buffer is None or isinstance(value.dtype, torch.dtype):
            return value
        return self._spec_of_buffer(value)

    # --- messages -------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], dst: int, channel: str) -> Handle[None]:
        """Sends tensors as one message; see `Transport.send`."""
        if channel not in STREAMS:
            return self.host.send(tensors, dst, channel)
        check_peer(dst, self.rank, self.world_size)
        specs = [self._spec_of(tensor) for tensor in tensors]
        full = [tensor for tensor in tensors if 0 not in tensor.shape]
        self._program_bytes += sum(tensor.nbytes for tensor in full)
        job = Job(
            Handle(self.watch, f"the delivery of a {channel!r} message to rank {dst}", (dst,)),
            (self.rank, dst),
            f"sent {describe(specs)} to rank {dst} on channel {channel!r}",
            _message_text(specs, self.rank, dst, channel),
            self._transfer([spec for spec in specs if 0 not in spec.shape], self.rank, dst),
            full,
            lambda results: None,
            to_host=False,
        )
        return self._queue.submit(job)

    def recv(self, specs: Sequence[Spec] | None, src: int, channel: str) -> Handle[Any]:
        """Receives tensors, or (not on a stream) any message as bytes; see `Transport.recv`."""
        if channel not in STREAMS:
            return self.host.recv(specs, src, channel)
        known = f"messages on {channel!r} are programs: both ends know their specs"
        assert specs is not None, known
        check_peer(src, self.rank, self.world_size)
        shapes = [(tuple(spec.shape), spec.dtype) for spec in specs]
        full = [spec for spec in specs if 0 not in spec.shape]

        def finish(results: list[torch.Tensor]) -> list[torch.Tensor]:
            arrived = iter(results)
            return [
                torch.empty(shape, dtype=dtype) if 0 in shape else next(arrived).reshape(shape)
                for shape, dtype in shapes
            ]

        job = Job(
            Handle(self.watch, f"a {channel!r} message from rank {src}", (src,)),
            (src, self.rank),
            f"expected {describe(specs)} from rank {src} on channel {channel!r}",
            _message_text(specs, src, self.rank, channel),
            self._transfer(full, src, self.rank),
            [None for _ in full],
            finish,
            to_host=False,
        )
        return self._queue.submit(job)

    def _transfer(self, specs: Sequence[Spec], src: int, dst: int) -> Program | None:
        """The program of a message; None if it has no bytes."""
        if not specs:
            return None
        operands = tuple(operand_of(spec) for spec in specs)
        return Program("transfer", self._meshes.of_pair(src, dst), operands, int(src > dst))

    # --- collectives ----------------------------------------------------------------------------

    def make_groups(self, groups: Sequence[Group]) -> None:
        """Makes groups usable for collectives; see `Transport.make_groups`."""
        self.host.make_groups(groups)
        self._meshes.add(groups)
        self._made |= {tuple(group) for group in groups if self.rank in group}

    def all_reduce(
        self, tensor: torch.Tensor, ranks: Group, is_spent: bool = False
    ) -> Handle[torch.Tensor]:
        """Sums over the ranks; see `Transport.all_reduce`."""
        check_summable(self._spec_of(tensor))
        shape = tuple(tensor.shape)
        return self._collective("all_reduce", self._spec_of(tensor), ranks, tensor, shape)

    def all_gather(self, tensor: torch.Tensor, ranks: Group) -> Handle[torch.Tensor]:
        """Collects [...] of every rank to [len(ranks), ...]; see `Transport.all_gather`."""
        shape = (len(ranks), *tensor.shape)
        return self._collective("all_gather", self._spec_of(tensor), ranks, tensor, shape)

    def reduce_scatter(self, tensor: torch.Tensor, ranks: Group) -> Handle[torch.Tensor]:
        """Sums [len(ranks), ...], keeps the own [...]; see `Transport.reduce_scatter`."""
        check_summable(self._spec_of(tensor))
        check_parts(tensor, ranks)
        shape = tuple(tensor.shape[1:])
        return self._collective("reduce_scatter", self._spec_of(tensor), ranks, tensor, shape)

    def broadcast(
        self, tensor: torch.Tensor | Spec, src: int, ranks: Group
    ) -> Handle[torch.Tensor]:
        """Gives the tensor of rank `src` to every rank of the group; see `Transport.broadcast`.

        A sum to which all others contribute zeros, so a negative zero comes as zero.
        """
        check_source(src, ranks)
        operand: Any = tensor if self.rank == src else None
        name = f"broadcast from rank {src}"
        return self._collective(name, self._spec_of(tensor), ranks, operand, tuple(tensor.shape))

    def barrier(self, ranks: Group) -> Handle[None]:
        """Done when every rank of the group has called it; see `Transport.barrier`."""
        spec = Operand((1,), torch.int32)
        return self._collective("barrier", spec, ranks, None, (1,), lambda result: None)

    def _collective(
        self,
        name: str,
        spec: Spec,
        ranks: Group,
        operand: torch.Tensor | None,
        shape: tuple[int, ...],
        unpack: Callable[[torch.Tensor], Any] = lambda result: result,
    ) -> Handle[Any]:
        """Queues a collective whose result has a shape; no operand means zeros."""
        ranks = check_group(ranks, self.rank, self.world_size)
        if ranks not in self._made:
            raise not_made(name, ranks, self.rank, sorted(self._made))
        dtype = spec.dtype
        others = ", ".join(str(rank) for rank in ranks if rank != self.rank) or "none"
        text = f"{name} of {describe([spec])} over the ranks {ranks}"
        program = self._collective_program(name, spec, ranks)

        def finish(results: list[torch.Tensor]) -> Any:
            if program is not None:
                return unpack(results[0].reshape(shape))
            if operand is None:
                return unpack(torch.zeros(shape, dtype=dtype))
            return unpack(self._fetch(operand).reshape(shape).clone())

        job = Job(
            Handle(
                self.watch,
                f"{name} of {describe([spec])} with rank {others}",
                tuple(rank for rank in ranks if rank != self.rank),
            ),
            ranks,
            f"came to {text}",
            text,
            program,
            [operand],
            finish,
            to_host=not isinstance(spec, torch.Tensor) or spec.device.type == "cpu",
        )
        return self._queue.submit(job)

    def _collective_program(self, name: str, spec: Spec, ranks: Group) -> Program | None:
        """The program of a collective; None if there is nothing to move."""
        if len(ranks) == 1 or 0 in spec.shape:
            return None
        op = name if name in ("all_gather", "reduce_scatter") else "all_reduce"
        return Program(op, self._meshes.of_group(ranks), (operand_of(spec),))

    def run_program(
        self, program: GraphProgram, operands: Sequence[torch.Tensor]
    ) -> Handle[list[torch.Tensor]]:
        """Runs a stage's program with collectives inside. Every rank of its mesh calls it.

        The program has the same collectives on all ranks; its results are on the host.
        """
        ranks = program.mesh.members
        others = tuple(rank for rank in ranks if rank != self.rank)
        text = f"the program {program.name} over the ranks {ranks}"
        job = Job(
            Handle(self.watch, f"{program.name} with rank {', '.join(map(str, others))}", others),
            ranks,
            f"came to {text}",
            text,
            program,
            list(operands),
            lambda results: results,
            to_host=True,
        )
        return self._queue.submit(job)

    # --- programs -------------------------------------------------------------------------------

    def prepare(self, uses: Sequence[Use], ranks: Group) -> None:
        """Loads the programs of communications to come; see `Transport.prepare`."""
        ranks = check_group(ranks, self.rank, self.world_size)
        own = {program for use in uses if (program := self._program_of(use)) is not None}
        everyone = self._objects.allgather(own, ranks)
        programs = sorted(set[Program]().union(*everyone), key=str)
        self._queue.load(programs, ranks).result()

    def _program_of(self, use: Use) -> Program | None:
        if use.op == "message":
            return self._transfer([spec for spec in use.specs if 0 not in spec.shape], *use.ranks)
        (spec,) = use.specs
        return self._collective_program(use.op, spec, tuple(use.ranks))

    def close(self, timeout_s: float = 60.0) -> None:
        """Ends the queue, the runner and the host transport; see `Transport.close`."""
        self._queue.close(timeout_s)
        self.host.close(timeout_s)


def _message_text(specs: Sequence[Spec], src: int, dst: int, channel: str) -> str:
    """A message in words that are the same at both ends."""
    return f"a message from rank {src} to rank {dst} on channel {channel!r} of {describe(specs)}"
