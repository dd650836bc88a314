"""Ranks, sizes, groups and object communication of SMP's API, as plain functions.

One-line readings of the session; names and meanings are those of the SMP API reference.
"""

from typing import Any

import torch.distributed as dist

from mpxla.config import Config
from mpxla.errors import ConfigError
from mpxla.session import current, current_models
from mpxla.topology import CommGroup, RankType

__all__ = [
    "allgather", "barrier", "broadcast", "dp_barrier", "dp_rank", "dp_size", "get_dp_group",
    "get_dp_process_group", "get_mp_group", "get_mp_process_group", "get_pp_group",
    "get_pp_process_group", "get_rdp_group", "get_rdp_process_group", "get_tp_group",
    "get_tp_process_group", "get_world_process_group", "is_tracing", "local_rank", "local_size",
    "mp_barrier", "mp_rank", "mp_size", "num_microbatches", "pp_rank", "pp_size", "rank",
    "rdp_rank", "rdp_size", "recv_from", "send", "size", "state", "tp_rank", "tp_size",
]  # fmt: skip


class _State:
    """Read-only view of the library's state; `cfg` is the resolved configuration."""

    @property
    def cfg(self) -> Config:
        """The resolved configuration, one attribute per key."""
        return current().config


state = _State()


def is_tracing() -> bool:
    """Whether this process is capturing a step function."""
    models = current_models()
    return models is not None and models.engine.is_tracing


def num_microbatches() -> int:
    """Configured number of microbatches."""
    return current().config.microbatches


def rank() -> int:
    """Global rank."""
    return current().rank


def size() -> int:
    """Number of processes."""
    return current().env.world_size


def local_rank() -> int:
    """Rank among the processes of this host."""
    return current().env.local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return current().env.local_size


def mp_rank() -> int:
    """Index within the model-parallel group."""
    return current().topology.mp_rank(rank())


def mp_size() -> int:
    """Size of the model-parallel group: pipeline degree times tensor-parallel degree."""
    return current().topology.mp_size


def dp_rank() -> int:
    """Index within the data-parallel group."""
    return current().topology.dp_rank(rank())


def dp_size() -> int:
    """Size of the data-parallel group."""
    return current().topology.dp_size


def pp_rank() -> int:
    """Index within the pipeline group."""
    return current().topology.pp_rank(rank())


def pp_size() -> int:
    """Number of pipeline ranks of a replica."""
    return current().topology.pp_size


def tp_rank() -> int:
    """Index within the tensor-parallel group."""
    return current().topology.tp_rank(rank())


def tp_size() -> int:
    """Tensor-parallel degree."""
    return current().topology.tp_size


def rdp_rank() -> int:
    """Index within the reduced-data-parallel group."""
    return current().topology.rdp_rank(rank())


def rdp_size() -> int:
    """Size of the reduced-data-parallel group."""
    return current().topology.rdp_size


def _members(group: CommGroup) -> tuple[int, ...]:
    return current().topology.group(group, rank())


def get_mp_group() -> list[int]:
    """Global ranks that hold this model replica."""
    return list(_members(CommGroup.MP_GROUP))


def get_dp_group() -> list[int]:
    """Global ranks that hold the same pipeline partition."""
    return list(_members(CommGroup.DP_GROUP))


def get_tp_group() -> list[int]:
    """Global ranks of the tensor-parallel group."""
    return list(_members(CommGroup.TP_GROUP))


def get_pp_group() -> list[int]:
    """Global ranks of the pipeline group."""
    return list(_members(CommGroup.PP_GROUP))


def get_rdp_group() -> list[int]:
    """Global ranks of the reduced-data-parallel group."""
    return list(_members(CommGroup.RDP_GROUP))


def _process_group(group: CommGroup) -> dist.ProcessGroup:
    groups = current().process_groups
    if not groups:
        raise ConfigError(
            "torch.distributed process groups are made with ddp: True; set it in the configuration."
        )
    return groups[group]


def get_world_process_group() -> dist.ProcessGroup:
    """`torch.distributed` group of all processes; needs `ddp: True`."""
    return _process_group(CommGroup.WORLD)


def get_mp_process_group() -> dist.ProcessGroup:
    """`torch.distributed` group of this model replica; needs `ddp: True`."""
    return _process_group(CommGroup.MP_GROUP)


def get_dp_process_group() -> dist.ProcessGroup:
    """`torch.distributed` group of this data-parallel group; needs `ddp: True`."""
    return _process_group(CommGroup.DP_GROUP)


def get_pp_process_group() -> dist.ProcessGroup:
    """`torch.distributed` group of this pipeline; needs `ddp: True`."""
    return _process_group(CommGroup.PP_GROUP)


def get_tp_process_group() -> dist.ProcessGroup:
    """`torch.distributed` group of this tensor-parallel group; needs `ddp: True`."""
    return _process_group(CommGroup.TP_GROUP)


def get_rdp_process_group() -> dist.ProcessGroup:
    """`torch.distributed` group of this reduced-data-parallel group; needs `ddp: True`."""
    return _process_group(CommGroup.RDP_GROUP)


def broadcast(obj: Any, group: CommGroup) -> None:
    """Sends a picklable object to every other member of the group.

    Only the sender calls it; each receiver calls `recv_from`. Returns when all have received.
    """
    current().user_objects.broadcast(obj, _members(group))


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends a picklable object to one process; returns when it has called `recv_from`."""
    current().user_objects.send(obj, current().topology.to_global(dest_rank, rank_type, rank()))


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Receives what a matching `send` or `broadcast` of that process sent."""
    return current().user_objects.recv_from(
        current().topology.to_global(src_rank, rank_type, rank())
    )


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Every member calls it; element i of the result is what member i passed."""
    return current().user_objects.allgather(obj, _members(group))


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits until every member of the caller's group has called it."""
    current().user_objects.barrier(_members(group))


def dp_barrier() -> None:
    """`barrier(DP_GROUP)`."""
    barrier(CommGroup.DP_GROUP)


def mp_barrier() -> None:
    """`barrier(MP_GROUP)`."""
    barrier(CommGroup.MP_GROUP)
