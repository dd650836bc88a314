"""Communication between processes through host memory: messages by TCP, collectives by gloo.

The default where several processes use XLA on CPU, and the carrier of objects everywhere. Tensors
on a device are copied to the host by a background thread, so the caller never waits for them.

Own process groups, apart from the default group: the user's collectives on the default group may
run at the same time, from another thread, and must not be taken for mpxla's.

This file knows gloo and threads; it must not know stages, schedules or the session.
"""

import atexit
import contextlib
import hashlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from mpxla.comm.by_host import GatherByHost, rows_by_host
from mpxla.comm.door import Door, connect
from mpxla.comm.handle import FailureWatch, Handle
from mpxla.comm.packing import Spec, as_bytes, copy_to_host, describe
from mpxla.comm.quiet import without_gloos_lines
from mpxla.comm.seal import Seal
from mpxla.comm.streams import MAX_CHANNEL_BYTES, Inbox, Outbox, Posted
from mpxla.comm.transport import (
    Group,
    Use,
    check_group,
    check_parts,
    check_peer,
    check_source,
    check_summable,
    not_made,
)
from mpxla.comm.worker import Worker
from mpxla.errors import RankMismatch

__all__ = ["HostTransport"]

# Waits end by the news of a failure, not by the clock: a rank may compile for an hour.
_GLOO_TIMEOUT = timedelta(days=7)
_FAREWELL_S = 2.0
_ABORT_S = 2.0
_SWAP_TAG = 4
_UNUSED_TAG = 3
_MAX_ADDRESS_BYTES = 64
_FIRST_LOOK_S = 0.002
_LONGEST_LOOK_S = 0.05


@dataclass
class _Job:
    """A collective in two phases: *fetch* the operand to the host, *run* gloo on it."""

    handle: Handle[Any]
    fetch: Callable[[], Any]
    run: Callable[[Any, dist.ProcessGroup | None], Any]


class _Collectives(Worker):
    """The collectives of one group, one after the other in a thread of their own.

    A thread per group: two groups with a rank in common may be used in different orders.
    """

    def __init__(self, ranks: Group, group: dist.ProcessGroup | None, watch: FailureWatch) -> None:
        super().__init__(f"mpxla-group-{ranks[0]}-{ranks[-1]}")
        self.ranks = ranks
        self.group = group
        self._watch = watch

    def submit(self, job: _Job) -> None:
        self.put(partial(self._do, job))

    def _do(self, job: _Job) -> None:
        try:
            operand = job.fetch()
            del job.fetch  # a copy of its tensor is all that is needed
        except BaseException as error:  # the other ranks wait for this one: they have to be told
            self._watch.fail(job.handle, f"computing the operand of {job.handle.what}", error)
            return
        try:
            job.handle.set_result(job.run(operand, self.group))
        except Exception as error:  # whatever it is, the thread has to answer what comes later
            job.handle.set_error(self._watch.account_for(error, self.ranks, job.handle.what))


def _swap(
    sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Starts to exchange bytes with the other member of a group of two; the result waits for it.

    gloo's collectives copy what they take and what they give (torch 2.9).
    """
    other = 1 - group.rank()
    works = [
        dist.irecv(received, group=group, group_src=other, tag=_SWAP_TAG),
        dist.isend(sent, group=group, group_dst=other, tag=_SWAP_TAG),
    ]

    def wait() -> None:
        for work in works:
            assert work is not None  # None is for ranks outside the group
            work.wait()

    return wait


def _key_of(key: bytes, dst: int) -> bytes:
    """What proves to belong to the messages to one rank, and to nothing else in the job."""
    return hmac.digest(key, f"messages to rank {dst}".encode(), hashlib.sha256)


def _is_on_host(tensor: Any) -> bool:
    return tensor.device.type == "cpu"


def _interrupt(group: dist.ProcessGroup) -> None:
    """Makes all communication of a process group fail at once, in all threads of this process.

    A receive that times out closes all connections of its group; gloo has no other way.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                nothing = [torch.empty(1, dtype=torch.uint8)]
                group.recv(nothing, peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


class HostTransport:
    """The transport of one process of a world of processes; see `transport.Transport`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        watch: FailureWatch,
        to_host: Callable[[Any], torch.Tensor] = copy_to_host,
        is_ready: Callable[[Any], bool] = _is_on_host,
        *,
        key: bytes,
        address: str,
    ) -> None:
        """Makes the process groups and opens the door. Every rank constructs it, at the same point.

        `torch.distributed` must be initialised with all ranks, by whatever backend. Background
        threads call `to_host`, which waits for a tensor and gives it in host memory, perhaps
        shared, and `is_ready`, which says whether that would not wait. By the address, others reach
        this process's host.
        """
        self._collective_bytes = 0
        self.seal = Seal(rank, key)
        self._to_host = to_host
        self._is_ready = is_ready
        self._pid = os.getpid()
        self._key = key
        self.rank = rank
        self.world_size = world_size
        self.watch = watch
        self._world: Group = tuple(range(world_size))
        self._lock = threading.Lock()
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._is_closed = False
        self._world_group = self._new_group(self._world)
        self._collectives: dict[Group, _Collectives] = {
            (rank,): _Collectives((rank,), None, watch),
            self._world: _Collectives(self._world, self._world_group, watch),
        }
        self._by_host: dict[Group, GatherByHost] = {}
        self._door = Door(
            address, world_size, _key_of(key, rank), "where ranks send messages", self._take_in
        )
        self._addresses = self._exchange(self._door.address)
        atexit.register(self._abort)

    @property
    def bytes_sent(self) -> int:
        """See `Transport.bytes_sent`."""
        return self._collective_bytes + sum(box.num_bytes for box in list(self._outboxes.values()))

    def send(self, tensors: Sequence[torch.Tensor], dst: int, channel: str) -> Handle[None]:
        """Sends tensors as one message; see `Transport.send`."""
        self._check_peer(dst, channel)
        return self._outbox(dst).put(tuple(tensors), channel)

    def recv(self, specs: Sequence[Spec] | None, src: int, channel: str) -> Handle[Any]:
        """Receives tensors, or any message as bytes; see `Transport.recv`."""
        self._check_peer(src, channel)
        handle: Handle[Any] = Handle(self.watch, f"a {channel!r} message from rank {src}", (src,))
        self._inbox(src).post(Posted(handle, specs), channel)
        return handle

    def make_groups(self, groups: Sequence[Group]) -> None:
        """Makes groups usable for collectives; see `Transport.make_groups`.

        Raises:
            TopologyError: Ranks that do not exist, or not ascending.
            RankMismatch: Another rank passed another list.
        """
        wanted = list(dict.fromkeys(tuple(ranks) for ranks in groups))
        for ranks in wanted:
            check_group(ranks, ranks[0] if ranks else 0, self.world_size)
        digest = hashlib.blake2b(repr(wanted).encode(), digest_size=8).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        for rank, other in enumerate(self.all_gather(own, self._world).result()):
            if not torch.equal(own, other):
                raise RankMismatch(
                    f"rank {self.rank} makes the groups {wanted}, but rank {rank} makes others. "
                    f"Call make_groups with the same list on every rank."
                )
        for ranks in wanted:
            if ranks not in self._collectives and len(ranks) > 1:
                group = self._new_group(ranks)
                if self.rank in ranks:
                    self._collectives[ranks] = _Collectives(ranks, group, self.watch)

    def gather_by_host(self, groups: Sequence[Group], hosts: Sequence[int]) -> list[Group]:
        """Lets gathers over groups go across hosts first; gives the groups for which it does.

        Every rank calls it, with equal arguments, once the groups are made; `hosts` has, of every
        rank of the world, the number of its host.
        """
        found = {ranks: rows for ranks in groups if (rows := rows_by_host(ranks, hosts))}
        for ranks, rows in found.items():
            # Groups of their own: the threads of others may be using theirs.
            made = {phase: self._new_group(phase) for phase in (*zip(*rows, strict=True), *rows)}
            if self.rank in ranks:
                across, inside = (made[phase] for phase in made if self.rank in phase)
                self._by_host[ranks] = GatherByHost(across, inside)
        return list(found)

    def prepare(self, uses: Sequence[Use], ranks: Group) -> None:
        """Nothing has to be readied; see `Transport.prepare`."""

    def all_reduce(
        self, tensor: torch.Tensor, ranks: Group, is_spent: bool = False
    ) -> Handle[torch.Tensor]:
        """Sums over the ranks; see `Transport.all_reduce`."""
        check_summable(tensor)

        def run(total: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
            if group is not None and total.numel():
                dist.all_reduce(total.view(-1), group=group)
            return total

        take = self._to_host if is_spent else self._own_copy
        return self._collective("all_reduce", tensor, ranks, lambda: take(tensor), run)

    def all_gather(self, tensor: torch.Tensor, ranks: Group) -> Handle[torch.Tensor]:
        """Collects [...] of every rank to [len(ranks), ...]; see `Transport.all_gather`."""
        by_host = self._by_host.get(tuple(ranks))

        def run(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
            gathered = torch.empty((len(ranks), *part.shape), dtype=part.dtype)
            if group is None:
                gathered[0] = part
            elif part.numel() and by_host is not None:
                by_host(gathered, part)
            elif part.numel() and len(ranks) == 2:
                own = ranks.index(self.rank)
                received = _swap(as_bytes(part), as_bytes(gathered[1 - own]), group)
                gathered[own] = part
                received()
            elif part.numel():
                dist.all_gather_into_tensor(as_bytes(gathered), as_bytes(part), group=group)
            return gathered

        return self._collective("all_gather", tensor, ranks, lambda: self._to_host(tensor), run)

    def reduce_scatter(self, tensor: torch.Tensor, ranks: Group) -> Handle[torch.Tensor]:
        """Sums [len(ranks), ...], keeps the own [...]; see `Transport.reduce_scatter`.

        gloo's own would reduce everything everywhere. Here every rank gets only its own part of
        every other rank, and adds the parts in the order of `ranks`.

        Raises:
            ValueError: The first dim of `tensor` is not the size of the group.
        """
        check_summable(tensor)
        check_parts(tensor, ranks)

        def run(parts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
            if group is None or not parts.numel():
                return parts[0].clone()
            if len(ranks) == 2:
                own = ranks.index(self.rank)
                total = torch.empty(parts.shape[1:], dtype=parts.dtype)
                _swap(as_bytes(parts[1 - own]), as_bytes(total), group)()
                return total.add_(parts[own])  # of two terms the order makes no difference
            received = torch.empty(parts.shape, dtype=parts.dtype)
            dist.all_to_all_single(as_bytes(received), as_bytes(parts), group=group)
            total = received[0] + received[1]
            for part in received[2:]:
                total += part
            return total

        return self._collective("reduce_scatter", tensor, ranks, lambda: self._to_host(tensor), run)

    def broadcast(
        self, tensor: torch.Tensor | Spec, src: int, ranks: Group
    ) -> Handle[torch.Tensor]:
        """Gives the tensor of rank `src` to every rank of the group; see `Transport.broadcast`."""
        check_source(src, ranks)

        def fetch() -> torch.Tensor:
            if self.rank != src:
                return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
            return self._own_copy(cast(torch.Tensor, tensor))

        def run(value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
            if group is not None and value.numel():
                dist.broadcast(as_bytes(value), src, group=group)
            return value

        # The source may be done, and gone, long before a slow member comes to it.
        awaited = (src,) if self.rank != src else ()
        return self._collective("broadcast", tensor, ranks, fetch, run, peers=(), awaited=awaited)

    def barrier(self, ranks: Group) -> Handle[None]:
        """Done when every rank of the group has called it; see `Transport.barrier`."""

        def run(token: torch.Tensor, group: dist.ProcessGroup | None) -> None:
            if group is not None:
                dist.all_reduce(token, group=group)

        return self._collective(
            "barrier", None, ranks, lambda: torch.zeros(1, dtype=torch.int32), run
        )

    def close(self, timeout_s: float = 60.0) -> None:
        """Delivers what was sent, then ends threads and groups; see `Transport.close`.

        Phases: *flush* what is queued, *part* from the peers, and *abort* what still waits. After
        a failure only the last.
        """
        if self._is_closed or os.getpid() != self._pid:  # a forked child shares the connections
            return
        self._is_closed = True
        if self.watch.told_failure() is None and dist.is_initialized():
            self._flush(timeout_s)
            self._await(lambda: not self._living_threads(), _FAREWELL_S)
        self._abort()

    def _flush(self, timeout_s: float) -> None:
        for outbox in self._outboxes.values():
            outbox.finish(is_orderly=True)
        for collectives in self._collectives.values():
            collectives.finish()
        threads = [collectives.thread for collectives in self._collectives.values()]
        self._await(
            lambda: (
                all(outbox.flushed.is_set() for outbox in self._outboxes.values())
                and not any(thread and thread.is_alive() for thread in threads)
            ),
            timeout_s,
        )

    def _abort(self) -> None:
        """Gets every thread out of gloo: it must not be there when the interpreter ends."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self._abort)
        self.watch.is_closing = True
        self._door.close()
        for outbox in self._outboxes.values():
            outbox.finish(is_orderly=False)
        for collectives in self._collectives.values():
            collectives.finish()
        groups = [c.group for c in self._collectives.values() if c.group is not None]
        groups += [group for phases in self._by_host.values() for group in phases]
        if self._living_threads():
            for box in (*self._outboxes.values(), *self._inboxes.values()):
                box.interrupt()
            for group in groups:
                _interrupt(group)
            self._await(lambda: not self._living_threads(), _ABORT_S)
        if not self._living_threads() and dist.is_initialized():
            for group in groups:
                with contextlib.suppress(ValueError):  # it is gone with all of them
                    dist.destroy_process_group(group)

    def _await(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        is_failing = self.watch.failure is not None
        pause_s = _FIRST_LOOK_S
        while not condition() and time.monotonic() < deadline:
            if self.watch.failure is not None and not is_failing:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    def _living_threads(self) -> list[threading.Thread]:
        boxes = [*self._outboxes.values(), *self._inboxes.values(), *self._collectives.values()]
        return [box.thread for box in boxes if box.thread and box.thread.is_alive()]

    def _new_group(self, ranks: Group) -> Any:
        with without_gloos_lines():
            return dist.new_group(list(ranks), timeout=_GLOO_TIMEOUT, backend="gloo")

    def _own_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in host memory, contiguous, not shared with the caller."""
        return self._to_host(tensor).clone(memory_format=torch.contiguous_format)

    def _outbox(self, dst: int) -> Outbox:
        with self._lock:
            if dst not in self._outboxes:
                key = _key_of(self._key, dst)
                advice = (
                    f"Allow TCP connections between the hosts of all ranks, and look at the output "
                    f"of rank {dst}."
                )
                open_stream = partial(connect, self._addresses[dst], self.rank, dst, key, advice)
                self._outboxes[dst] = Outbox(
                    dst, open_stream, self.watch, self._to_host, self._is_ready
                )
            return self._outboxes[dst]

    def _inbox(self, src: int) -> Inbox:
        with self._lock:
            if src not in self._inboxes:
                self._inboxes[src] = Inbox(src, self.watch)
            return self._inboxes[src]

    def _take_in(self, src: int, home: str, connection: socket.socket) -> None:
        threading.current_thread().name = f"mpxla-recv-{src}"
        self._inbox(src).read(connection)

    def _exchange(self, address: tuple[str, int]) -> list[tuple[str, int]]:
        """Where every rank takes messages."""
        text = "{} {}".format(*address).encode().ljust(_MAX_ADDRESS_BYTES)
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in self._world]
        dist.all_gather(found, own, group=self._world_group)
        pairs = [bytes(other.tolist()).decode().split() for other in found]
        return [(host, int(port)) for host, port in pairs]

    def _check_peer(self, peer: int, channel: str) -> None:
        check_peer(peer, self.rank, self.world_size)
        assert 0 < len(channel.encode()) <= MAX_CHANNEL_BYTES, f"channel name {channel!r}"
        assert not self._is_closed, "the transport is closed"

    def _collective(
        self,
        name: str,
        tensor: torch.Tensor | Spec | None,
        ranks: Group,
        fetch: Callable[[], Any],
        run: Callable[[Any, dist.ProcessGroup | None], Any],
        peers: Group | None = None,
        awaited: Group | None = None,
    ) -> Handle[Any]:
        """Queues a collective on its group's thread."""
        ranks = check_group(ranks, self.rank, self.world_size)
        collectives = self._collectives.get(ranks)
        if collectives is None:
            raise not_made(name, ranks, self.rank, self._collectives)
        others = tuple(rank for rank in ranks if rank != self.rank)
        if others and not awaited:  # who receives a broadcast awaits its source, and sends nothing
            self._collective_bytes += getattr(tensor, "nbytes", 0)
        about = f" of {describe([tensor])}" if tensor is not None else ""
        what = f"{name}{about} with rank {', '.join(map(str, others)) or 'none'}"
        peers = others if peers is None else peers
        handle: Handle[Any] = Handle(self.watch, what, peers, awaited)
        collectives.submit(_Job(handle, fetch, run))
        return handle
