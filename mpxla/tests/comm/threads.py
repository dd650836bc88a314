"""Communication inside one process, so that logic that talks through a transport can be tested with
one thread per rank. Same protocol as `host`, same pairing rules, no devices.

The threads of a world share its mail. A message goes to the receive that was posted for it, or
waits; a collective is computed by whichever rank comes to it last.
"""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpxla.comm.handle import Failure, FailureWatch, Handle
from mpxla.comm.packing import Spec, copy_to_host, describe, pack
from mpxla.comm.seal import Seal
from mpxla.comm.transport import (
    Group,
    Use,
    check_group,
    check_parts,
    check_peer,
    check_source,
    check_summable,
)
from mpxla.errors import RankMismatch

__all__ = ["ThreadTransport", "threads_world"]

SETTLE_S = 1.0
"""Messages between threads are never under way for long."""

_Combine = Callable[[list[Any]], list[Any]]


@dataclass
class _Meeting:
    """A collective that some ranks have come to."""

    name: str
    operands: dict[int, Any] = field(default_factory=dict)
    handles: dict[int, Handle[Any]] = field(default_factory=dict)


class _World:
    """What the ranks of one world of threads share."""

    def __init__(self, world_size: int) -> None:
        self.lock = threading.Lock()
        self.key = secrets.token_bytes(32)
        self.watches = [_SharedWatch(rank, self, world_size) for rank in range(world_size)]
        self.messages: dict[tuple[int, int, str], deque[list[torch.Tensor]]] = {}
        self.posted: dict[tuple[int, int, str], deque[_Posted]] = {}
        self.meetings: dict[tuple[Group, int], _Meeting] = {}


@dataclass
class _Posted:
    """A receive that waits for its message."""

    handle: Handle[Any]
    specs: Sequence[Spec] | None


class _SharedWatch(FailureWatch):
    """The watch of one thread; its report reaches all threads of the world."""

    def __init__(self, rank: int, world: _World, world_size: int) -> None:
        super().__init__(rank, world_size, settle_s=SETTLE_S)
        self._world = world

    def _spread(self, failure: Failure) -> None:
        for watch in self._world.watches:
            watch.set_failure(failure)


class ThreadTransport:
    """The transport of one thread; see `transport.Transport`."""

    bytes_sent = 0  # nothing leaves the process

    def __init__(self, rank: int, world: _World) -> None:
        """Joins a world.

        Args:
            rank: Rank in `world`.
            world: Given by `threads_world`.
        """
        self._world = world
        self.rank = rank
        self.world_size = len(self._world.watches)
        self.watch: FailureWatch = self._world.watches[rank]
        self.seal = Seal(rank, self._world.key)
        self._num_meetings: dict[Group, int] = {}

    def send(self, tensors: Sequence[torch.Tensor], dst: int, channel: str) -> Handle[None]:
        """Sends tensors as one message; see `Transport.send`."""
        check_peer(dst, self.rank, self.world_size)
        message = [self._own_copy(tensor) for tensor in tensors]
        key = (self.rank, dst, channel)
        with self._world.lock:
            waiting = self._world.posted.get(key)
            posted = waiting.popleft() if waiting else None
            if posted is None:
                self._world.messages.setdefault(key, deque()).append(message)
        if posted is not None:
            _complete(posted, message, key)
        handle: Handle[None] = Handle(self.watch, f"a {channel!r} message to rank {dst}", (dst,))
        handle.set_result(None)
        return handle

    def make_groups(self, groups: Sequence[Group]) -> None:
        """Checks the groups; nothing has to be made. See `Transport.make_groups`."""
        for ranks in groups:
            check_group(ranks, ranks[0] if ranks else 0, self.world_size)

    def prepare(self, uses: Sequence[Use], ranks: Group) -> None:
        """Nothing has to be readied; see `Transport.prepare`."""

    def all_reduce(
        self, tensor: torch.Tensor, ranks: Group, is_spent: bool = False
    ) -> Handle[torch.Tensor]:
        """Sums over the ranks; see `Transport.all_reduce`."""
        check_summable(tensor)
        return self._meet("all_reduce", self._own_copy(tensor), ranks, _sum_everywhere)

    def all_gather(self, tensor: torch.Tensor, ranks: Group) -> Handle[torch.Tensor]:
        """Collects [...] of every rank to [len(ranks), ...]; see `Transport.all_gather`."""
        return self._meet(
            "all_gather",
            self._own_copy(tensor),
            ranks,
            lambda parts: [torch.stack(parts) for _ in parts],
        )

    def reduce_scatter(self, tensor: torch.Tensor, ranks: Group) -> Handle[torch.Tensor]:
        """Sums [len(ranks), ...], keeps the own [...]; see `Transport.reduce_scatter`."""
        check_summable(tensor)
        check_parts(tensor, ranks)
        return self._meet(
            "reduce_scatter",
            self._own_copy(tensor),
            ranks,
            lambda operands: [part.clone() for part in _sum(operands)],
        )

    def broadcast(
        self, tensor: torch.Tensor | Spec, src: int, ranks: Group
    ) -> Handle[torch.Tensor]:
        """Gives the tensor of rank `src` to every rank of the group; see `Transport.broadcast`."""
        check_source(src, ranks)
        operand = None
        if self.rank == src:
            operand = self._own_copy(tensor)
        index = tuple(ranks).index(src)
        return self._meet(
            f"broadcast from rank {src}",
            operand,
            ranks,
            lambda operands: [operands[index].clone() for _ in operands],
        )

    def barrier(self, ranks: Group) -> Handle[None]:
        """Done when every rank of the group has called it; see `Transport.barrier`."""
        return self._meet("barrier", None, ranks, lambda operands: [None for _ in operands])

    def close(self, timeout_s: float = 60.0) -> None:
        """Tells the other threads that this rank has left; see `Transport.close`."""
        for watch in self._world.watches:
            watch.set_left(self.rank)

    def _own_copy(self, tensor: Any) -> torch.Tensor:
        return copy_to_host(tensor).clone(memory_format=torch.contiguous_format)

    def recv(self, specs: Sequence[Spec] | None, src: int, channel: str) -> Handle[Any]:
        """Receives tensors, or any message as bytes; see `Transport.recv`."""
        check_peer(src, self.rank, self.world_size)
        handle: Handle[Any] = Handle(self.watch, f"a {channel!r} message from rank {src}", (src,))
        posted = _Posted(handle, specs)
        key = (src, self.rank, channel)
        with self._world.lock:
            arrived = self._world.messages.get(key)
            message = arrived.popleft() if arrived else None
            if message is None:
                self._world.posted.setdefault(key, deque()).append(posted)
        if message is not None:
            _complete(posted, message, key)
        return handle

    def _meet(self, name: str, operand: Any, ranks: Group, combine: _Combine) -> Handle[Any]:
        """Comes to a collective; the last one to come computes it for all."""
        ranks = check_group(ranks, self.rank, self.world_size)
        others = tuple(rank for rank in ranks if rank != self.rank)
        handle: Handle[Any] = Handle(self.watch, f"{name} with ranks {others}", others)
        number = self._num_meetings.get(ranks, 0)
        self._num_meetings[ranks] = number + 1
        with self._world.lock:
            meeting = self._world.meetings.setdefault((ranks, number), _Meeting(name))
            meeting.operands[self.rank] = operand
            meeting.handles[self.rank] = handle
            is_complete = len(meeting.handles) == len(ranks)
            if is_complete:
                del self._world.meetings[ranks, number]
        if meeting.name != name:
            error = RankMismatch(
                f"rank {self.rank} came to {name} of the group {ranks} where another rank came to "
                f"{meeting.name}. Call the same collectives in the same order on all ranks."
            )
            self.watch.report(name, error)
            raise error
        if is_complete:
            results = combine([meeting.operands[rank] for rank in ranks])
            for rank, result in zip(ranks, results, strict=True):
                meeting.handles[rank].set_result(result)
        return handle


def threads_world(world_size: int) -> list[ThreadTransport]:
    """Makes the transports of a world of threads in this process.

    Args:
        world_size: Number of ranks.

    Returns:
        One transport per rank, each for one thread.
    """
    world = _World(world_size)
    return [ThreadTransport(rank, world) for rank in range(world_size)]


def _sum(operands: list[torch.Tensor]) -> torch.Tensor:
    total = operands[0].clone()
    for operand in operands[1:]:
        total += operand
    return total


def _sum_everywhere(operands: list[torch.Tensor]) -> list[torch.Tensor]:
    total = _sum(operands)
    return [total.clone() for _ in operands]


def _complete(posted: _Posted, message: list[torch.Tensor], key: tuple[int, int, str]) -> None:
    if posted.specs is None:
        posted.handle.set_result(pack(message))
        return
    expected, actual = describe(posted.specs), describe(message)
    if expected == actual:
        posted.handle.set_result(message)
        return
    src, dst, channel = key
    posted.handle.set_error(
        RankMismatch(
            f"rank {dst} expected {expected} from rank {src} on channel {channel!r}, but was sent "
            f"{actual}. Run the same script with the same model and arguments on all ranks."
        )
    )
