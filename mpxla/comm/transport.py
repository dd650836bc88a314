"""What the rest of mpxla may ask of communication, whatever carries it.

One class per backend (`host`, `loopback`, `xla`) follows this protocol, chosen once when the
session starts. Ranks are global ranks; a group is the tuple of its ranks, ascending.

Point to point: messages from one rank to another arrive in the order of sending per *channel*, a
short name such as `forward`. Channels do not wait for each other at the receiver. A send never
waits for the receive to be posted before it returns, and a receive may be posted before the send.

Every call returns at once with a handle. Tensors that are sent or reduced may still be computing on
a device; they must not be changed in place before the handle is done. Results are host tensors;
only `xla` on an accelerator leaves them on the device, unless the operand was on the host.

`xla` is stricter where collectives inside programs are: see its module.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import torch

from mpxla.comm.handle import FailureWatch, Handle
from mpxla.comm.packing import Spec
from mpxla.comm.seal import Seal
from mpxla.errors import TopologyError

__all__ = [
    "Group",
    "Groups",
    "Members",
    "Transport",
    "Use",
    "check_group",
    "check_parts",
    "check_peer",
    "check_source",
    "check_summable",
    "not_made",
]

Group = tuple[int, ...]
"""Global ranks, ascending."""


class Use(NamedTuple):
    """A communication that will come."""

    op: Literal["message", "all_reduce", "all_gather", "reduce_scatter", "broadcast"]
    """What will be called; `message` for a `send` and its `recv`."""
    ranks: Group
    """The group; for a message the sender and then the receiver."""
    specs: tuple[Spec, ...]
    """Operands as they will be passed: of a message all tensors, else one."""


class Transport(Protocol):
    """Moves tensors between ranks in the background."""

    rank: int
    """Global rank of the caller."""
    world_size: int
    """Number of ranks."""
    watch: FailureWatch
    """Ends waits when a rank fails."""
    seal: Seal
    """Tells messages of this job's ranks from others; for whoever unpickles or believes them."""

    @property
    def bytes_sent(self) -> int:
        """Of messages, and of this rank's operands of collectives, so far."""
        ...

    def send(self, tensors: Sequence[torch.Tensor], dst: int, channel: str) -> Handle[None]:
        """Sends tensors as one message.

        Returns:
            Handle that is done when they have left this process, which may take until `dst` posts
            its first receive from this rank.
        """
        ...

    def recv(self, specs: Sequence[Spec] | None, src: int, channel: str) -> Handle[Any]:
        """Receives what a matching `send` sent.

        Args:
            specs: Shapes and dtypes, which must be those of the sender. None takes any message.
            src: Sending rank.
            channel: The sender's channel.

        Returns:
            Handle of the tensors, views of one buffer; without specs of the message's flat bytes.
            RankMismatch if the sender's shapes or dtypes differ.
        """
        ...

    def make_groups(self, groups: Sequence[Group]) -> None:
        """Makes groups usable for collectives.

        Every rank calls it with the same list, also for groups that it is not part of. The group
        of all ranks and groups of one need not be made.
        """
        ...

    def prepare(self, uses: Sequence[Use], ranks: Group) -> None:
        """Readies communications before their first use: `xla` loads their programs.

        Every rank of `ranks` calls it, at the same point, each with what it knows of; all ready
        what any of them names. Returns when they have. Other transports have nothing to ready.
        What is not prepared is readied by its members at its first use.
        """
        ...

    def all_reduce(
        self, tensor: torch.Tensor, ranks: Group, is_spent: bool = False
    ) -> Handle[torch.Tensor]:
        """Sums over the ranks. Every rank of `ranks` calls it, with equal shapes and dtypes.

        Args:
            tensor: This rank's term.
            ranks: The group.
            is_spent: Nobody needs the term any more: the sum may take its memory.

        Returns:
            Handle of the sum, the same bits on every rank.
        """
        ...

    def all_gather(self, tensor: torch.Tensor, ranks: Group) -> Handle[torch.Tensor]:
        """Collects a tensor [...] of every rank. Every rank of `ranks` calls it.

        Returns:
            Handle of [len(ranks), ...], in the order of `ranks`.
        """
        ...

    def reduce_scatter(self, tensor: torch.Tensor, ranks: Group) -> Handle[torch.Tensor]:
        """Sums [len(ranks), ...] over the ranks and keeps the own part.

        Every rank of `ranks` calls it. The terms are added in the order of `ranks`, except by
        `xla`, which leaves the order to the device.

        Returns:
            Handle of [...]: the sum of what every rank passed at the caller's index.
        """
        ...

    def broadcast(
        self, tensor: torch.Tensor | Spec, src: int, ranks: Group
    ) -> Handle[torch.Tensor]:
        """Gives the tensor of rank `src` to every rank of `ranks`, all of which call it.

        Args:
            tensor: On `src` the tensor; elsewhere its shape and dtype suffice.
            src: Global rank of the sender.
            ranks: The group, with `src` in it.
        """
        ...

    def barrier(self, ranks: Group) -> Handle[None]:
        """Done when every rank of `ranks` has called it."""
        ...

    def close(self, timeout_s: float = 60.0) -> None:
        """Delivers what was sent, then releases connections and threads. Every rank calls it.

        Args:
            timeout_s: Longest wait for the others to take what was sent to them.
        """
        ...


class Members(NamedTuple):
    """What the name of a group means on this rank."""

    ranks: Group
    """This rank is one of them, and the transport has made this group."""
    transport: Transport
    """Carries their collectives."""


Groups = Mapping[str, Members]
"""The groups that a program may communicate in, by name."""


def check_group(ranks: Group, rank: int, world_size: int) -> Group:
    """Checks the ranks of a collective, of which the caller's has to be one.

    Raises:
        TopologyError: Not ascending, outside the world, or without the caller.
    """
    group = tuple(ranks)
    is_ascending = all(a < b for a, b in pairwise(group))
    if not group or not is_ascending or group[0] < 0 or group[-1] >= world_size:
        raise TopologyError(
            f"group {group} on rank {rank}: give different global ranks between 0 and "
            f"{world_size - 1}, ascending."
        )
    if rank not in group:
        raise TopologyError(
            f"rank {rank} called a communication of group {group}, of which it is no member. Call "
            f"it on the ranks of the group only."
        )
    return group


def check_peer(peer: int, rank: int, world_size: int) -> None:
    """Checks the other end of a message.

    Raises:
        TopologyError: No such rank, or the caller itself.
    """
    if not 0 <= peer < world_size or peer == rank:
        raise TopologyError(
            f"rank {rank} cannot exchange messages with rank {peer}: give another rank between 0 "
            f"and {world_size - 1}."
        )


def check_source(src: int, ranks: Group) -> None:
    """Checks the sender of a broadcast.

    Raises:
        TopologyError: It is not in the group.
    """
    if src not in ranks:
        raise TopologyError(
            f"broadcast from rank {src} in the group {tuple(ranks)}: rank {src} is no member. Give "
            f"a member as the source."
        )


def not_made(name: str, ranks: Group, rank: int, made: Iterable[Group]) -> TopologyError:
    """The error of a collective over a group that `make_groups` was not called with."""
    return TopologyError(
        f"rank {rank}: {name} over the ranks {ranks}, for which no group was made (made: "
        f"{', '.join(map(str, made))}). Call make_groups with it on every rank first."
    )


def check_parts(tensor: torch.Tensor, ranks: Group) -> None:
    """Checks the operand of a reduce_scatter.

    Raises:
        ValueError: Its first dim is not the size of the group.
    """
    if not tensor.shape or tensor.shape[0] != len(ranks):
        raise ValueError(
            f"reduce_scatter over the {len(ranks)} ranks {tuple(ranks)} got a tensor of shape "
            f"{list(tensor.shape)}: its first dim has to be {len(ranks)}."
        )


def check_summable(tensor: Spec) -> None:
    """Checks the operand of a sum.

    Raises:
        TypeError: It is a bool tensor, whose sum would be no bool.
    """
    if tensor.dtype is torch.bool:
        raise TypeError("a bool tensor cannot be summed over ranks: convert it to int32 first.")
