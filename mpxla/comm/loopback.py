"""Communication of a world of one: what a rank passes to a collective is what it gets.

A script that runs in a single process needs no sockets. Same protocol and same checks as `host`.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from mpxla.comm.handle import FailureWatch, Handle
from mpxla.comm.packing import Spec, copy_to_host
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

__all__ = ["LoopbackTransport"]

T = TypeVar("T")


class LoopbackTransport:
    """A transport without other processes; see `transport.Transport`."""

    bytes_sent = 0  # nothing leaves the process

    def __init__(self, to_host: Callable[[Any], torch.Tensor] = copy_to_host) -> None:
        self.rank, self.world_size = 0, 1
        self.watch = FailureWatch(0)
        self.seal = Seal(0, secrets.token_bytes(32))
        self._to_host = to_host

    def send(self, tensors: Sequence[torch.Tensor], dst: int, channel: str) -> NoReturn:
        """There is nobody to send to; see `Transport.send`."""
        self._find(dst)

    def recv(self, specs: Sequence[Spec] | None, src: int, channel: str) -> NoReturn:
        """There is nobody to receive from; see `Transport.recv`."""
        self._find(src)

    def make_groups(self, groups: Sequence[Group]) -> None:
        """Checks the groups; nothing has to be made. See `Transport.make_groups`."""
        for ranks in groups:
            check_group(ranks, self.rank, self.world_size)

    def prepare(self, uses: Sequence[Use], ranks: Group) -> None:
        """Nothing has to be readied; see `Transport.prepare`."""

    def all_reduce(
        self, tensor: torch.Tensor, ranks: Group, is_spent: bool = False
    ) -> Handle[torch.Tensor]:
        """The tensor; see `Transport.all_reduce`."""
        check_summable(tensor)
        return self._done("all_reduce", self._own_copy(tensor), ranks)

    def all_gather(self, tensor: torch.Tensor, ranks: Group) -> Handle[torch.Tensor]:
        """[...] as [1, ...]; see `Transport.all_gather`."""
        return self._done("all_gather", self._own_copy(tensor)[None], ranks)

    def reduce_scatter(self, tensor: torch.Tensor, ranks: Group) -> Handle[torch.Tensor]:
        """[1, ...] as [...]; see `Transport.reduce_scatter`."""
        check_summable(tensor)
        check_parts(tensor, ranks)
        return self._done("reduce_scatter", self._own_copy(tensor)[0], ranks)

    def broadcast(
        self, tensor: torch.Tensor | Spec, src: int, ranks: Group
    ) -> Handle[torch.Tensor]:
        """The tensor; see `Transport.broadcast`."""
        check_source(src, ranks)
        return self._done(f"broadcast from rank {src}", self._own_copy(tensor), ranks)

    def barrier(self, ranks: Group) -> Handle[None]:
        """Done; see `Transport.barrier`."""
        return self._done("barrier", None, ranks)

    def close(self, timeout_s: float = 60.0) -> None:
        """There is nobody to tell; see `Transport.close`."""
        self.watch.set_left(self.rank)

    def _find(self, peer: int) -> NoReturn:
        check_peer(peer, self.rank, self.world_size)
        raise AssertionError("a world of one has no other rank")

    def _own_copy(self, tensor: Any) -> torch.Tensor:
        return self._to_host(tensor).clone(memory_format=torch.contiguous_format)

    def _done(self, name: str, value: T, ranks: Group) -> Handle[T]:
        check_group(ranks, self.rank, self.world_size)
        handle: Handle[T] = Handle(self.watch, name)
        handle.set_result(value)
        return handle
