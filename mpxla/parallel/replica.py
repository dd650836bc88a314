"""Where a rank stands among the replicas: its parameters, its pipeline, and who has the same.

Start values and buffers are made equal here too: those of the first replica, and of the first
holder of a shared tensor, are everyone's.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from mpxla.comm.agreement import check_agreement
from mpxla.comm.objects import Objects
from mpxla.comm.packing import as_bytes, as_memory, pack, unpack
from mpxla.comm.transport import Transport
from mpxla.device.backend import Backend
from mpxla.parallel.store import ParameterStore
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.state import ModelState
from mpxla.session import Session
from mpxla.stage.spec import TensorSpec

__all__ = ["Replica", "check_equal_values", "equalize", "equalize_beside", "follow"]


@dataclass(frozen=True)
class Replica:
    """One rank, its pipeline, and the ranks that hold the same stages in other replicas.

    The ranks of `group`, by dp_rank, hold the same parameters; those of `part_group` among them
    hold the same parts of divided ones. `pp_rank` is this rank's place in its pipeline.
    """

    transport: Transport
    objects: Objects
    group: tuple[int, ...]
    part_group: tuple[int, ...]
    pp_rank: int
    link: PipelineLink
    store: ParameterStore

    @property
    def backend(self) -> Backend:
        """Of this rank's device."""
        return self.store.backend

    @property
    def state(self) -> ModelState:
        """The model's parameters and buffers by name."""
        return self.store.state

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.transport.rank

    @property
    def count(self) -> int:
        """Number of replicas."""
        return len(self.group)


def equalize(replica: Replica, source: int, names: Iterable[str]) -> None:
    """Gives all replicas, and all holders of a shared tensor, the same values of what is whole.

    All ranks must call it, with equal names; everyone gets the values of the replica `source`. What
    steps carry in attributes stays that of each replica.
    """
    chosen = {name for name in names if not replica.state.is_carried(name)}
    follow(replica, source, chosen)
    _equalize_shared(replica, chosen)


def follow(replica: Replica, source: int, names: Iterable[str]) -> None:
    """Gives all replicas the values of one of them, of what this rank holds whole.

    What steps carry in attributes stays that of each. The ranks of the group call it, with equal
    names.
    """
    chosen = {name for name in names if not replica.state.is_carried(name)}
    local, ranks = replica.store.local_tensors(), replica.store.ranks
    names = [n for n in sorted(local) if n in chosen and replica.pp_rank in ranks[n]]
    if replica.count > 1 and names:
        packed = pack([local[name].detach().cpu() for name in names])
        sender = replica.group[source]
        packed = replica.transport.broadcast(packed, sender, replica.group).result()
        if replica.rank != sender:
            specs = [TensorSpec.of(local[n]) for n in names]
            replica.store.write(names, unpack(packed, specs))


def _equalize_shared(replica: Replica, chosen: Set[str]) -> None:
    local, ranks = replica.store.local_tensors(), replica.store.ranks
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(chosen & ranks.keys()):
        if len(ranks[name]) > 1 and name not in replica.state.shards:
            groups.setdefault(ranks[name], []).append(name)
    for (first, *others), names in sorted(groups.items()):
        if replica.pp_rank in (first, *others):
            values = replica.link.hand_over(first, others, [local[name] for name in names])
            if values is not None:
                replica.store.write(names, values)


def equalize_beside(session: Session, tensors: Sequence[torch.Tensor]) -> None:
    """Gives all replicas the tensors of the first that an optimizer keeps beside its parameters.

    Copies of parameters that were made before differ where replicas have different random seeds.
    Tensors on a device stay. All ranks call it.
    """
    group = session.topology.rdp_group(session.rank)
    hosted = [t for t in tensors if t.device.type == "cpu" and t.dim() > 0]
    if len(group) == 1 or not hosted:
        return
    digests = [digest_of(tensor) for tensor in hosted]
    everyone = session.objects.allgather(digests, group)
    for number, tensor in enumerate(hosted):
        if any(other[number] != everyone[0][number] for other in everyone):
            value = session.transport.broadcast(tensor.detach().contiguous(), group[0], group)
            with torch.no_grad():
                tensor.copy_(value.result())


def check_equal_values(
    objects: Objects, group: Sequence[int], values: Mapping[str, torch.Tensor]
) -> None:
    """Checks that all ranks of a group have the same tensors; all of them call it.

    They compare digests: hashing takes a second for some 600 MB, which is less than reading took.

    Raises:
        RankMismatch: with the first name where they differ.
    """
    if len(group) == 1:
        return
    check_agreement(
        objects,
        group,
        [f"{name}: {digest_of(value)}" for name, value in sorted(values.items())],
        "give other values to model.load_state_dict",
        "Ranks divide these parameters (sharded_data_parallel_degree): each would keep its part of "
        "its own values. Load the same file on all ranks, or send the values of one rank to the "
        "others (smp.broadcast) before.",
    )


def digest_of(tensor: torch.Tensor) -> str:
    """Type, shape and a hash of the bytes of a tensor; waits for it."""
    hashed = hashlib.md5(as_memory(as_bytes(tensor.cpu())), usedforsecurity=False).hexdigest()
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)} with digest {hashed}"
