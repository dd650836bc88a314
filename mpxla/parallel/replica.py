"""Where a rank stands among the replicas: what everything that works over replicas has in common.

Start values and buffers are made equal here too: those of the first replica, and of the first
holder of a shared tensor, are everyone's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mpxla.comm.objects import Objects
from mpxla.comm.packing import pack, unpack
from mpxla.comm.transport import Transport
from mpxla.device.backend import Backend, Buffer
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.state import ModelState
from mpxla.stage.spec import TensorSpec

__all__ = ["Replica", "equalize", "store"]


@dataclass(frozen=True)
class Replica:
    """One rank, its pipeline, and the ranks that hold the same stages in other replicas.

    Attributes:
        transport: the session's transport.
        objects: the session's object communication.
        group: global ranks that hold the same parameters, by dp_rank.
        pp_rank: this rank's place in its pipeline.
        link: messages to the other ranks of the pipeline.
        backend: of this rank's device.
        state: the model's parameters and buffers.
    """

    transport: Transport
    objects: Objects
    group: tuple[int, ...]
    pp_rank: int
    link: PipelineLink
    backend: Backend
    state: ModelState

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.transport.rank

    @property
    def index(self) -> int:
        """This rank's place in `group`."""
        return self.group.index(self.rank)

    @property
    def count(self) -> int:
        """Number of replicas."""
        return len(self.group)

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this rank, by name."""
        local = self.state.local_names or frozenset()
        buffers = {n: b for n, b in self.state.buffers.items() if n in local}
        return {**dict(self.state.local_parameters()), **buffers}


def equalize(replica: Replica, source: int, parameter_ranks: Mapping[str, tuple[int, ...]]) -> None:
    """Gives all replicas, and all holders of a shared tensor, the same values.

    All ranks must call it.

    Args:
        replica: this rank.
        source: index of the replica whose values everyone gets.
        parameter_ranks: pipeline ranks that hold each parameter and buffer.
    """
    local = replica.local_tensors()
    names = [n for n in sorted(local) if replica.pp_rank in parameter_ranks[n]]
    if replica.count > 1 and names:
        packed = pack([local[name].detach().cpu() for name in names])
        sender = replica.group[source]
        packed = replica.transport.broadcast(packed, sender, replica.group).result()
        if replica.rank != sender:
            store(replica, names, unpack(packed, [TensorSpec.of(local[n]) for n in names]))
    _equalize_shared(replica, parameter_ranks)


def _equalize_shared(replica: Replica, parameter_ranks: Mapping[str, tuple[int, ...]]) -> None:
    local = replica.local_tensors()
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(parameter_ranks):
        if len(parameter_ranks[name]) > 1:
            groups.setdefault(parameter_ranks[name], []).append(name)
    for (first, *others), names in sorted(groups.items()):
        if replica.pp_rank == first:
            replica.link.send_values(others, [local[name] for name in names], "tied")
        elif replica.pp_rank in others:
            specs = [TensorSpec.of(local[name]) for name in names]
            store(replica, names, replica.link.receive_from(first, specs, "tied")())


def store(replica: Replica, names: Sequence[str], values: Sequence[Buffer]) -> None:
    """Replaces parameters and buffers of this rank, by tensors on the host or on the device."""
    published = replica.backend.publish(replica.backend.put(values))
    for name, value in zip(names, published, strict=True):
        if name in replica.state.parameters:
            replica.state.parameters[name].data = value
        else:
            replica.state.set_buffer(name, value)
