"""How the ranks of a job find each other: lifeline, transports and groups, made by `init`.

This module must not know models, nor the session that keeps what it makes.
"""

from typing import Any, NamedTuple, cast

import torch.distributed as dist

from mpxla import __version__, log
from mpxla.comm.addresses import interface_for
from mpxla.comm.agreement import agreed
from mpxla.comm.codec import DATA, STATE
from mpxla.comm.host import HostTransport
from mpxla.comm.lifeline import Lifeline
from mpxla.comm.loopback import LoopbackTransport
from mpxla.comm.objects import Objects
from mpxla.comm.quiet import without_gloos_lines
from mpxla.comm.rollcall import call_roll
from mpxla.comm.secret import agree_on_key
from mpxla.comm.stall import Progress
from mpxla.comm.store import GROUP_TIMEOUT, session_store
from mpxla.comm.transport import Group, Transport
from mpxla.comm.xla import XlaTransport
from mpxla.config import Config
from mpxla.device.backend import Backend
from mpxla.env import LaunchEnv, prepare_gloo
from mpxla.topology import CommGroup, Topology

__all__ = ["Connection", "connect", "make_process_groups"]


class Connection(NamedTuple):
    """What ranks reach each other by; the attributes of `Session`."""

    transport: Any
    objects: Objects
    state_objects: Objects
    user_objects: Objects
    lifeline: Lifeline | None
    owns_default_group: bool
    progress: Progress


def connect(
    config: Config, env: LaunchEnv, topology: Topology, backend: Backend, owns_group: bool
) -> Connection:
    """Connects this rank to all others; every rank calls it.

    Args:
        config: the resolved configuration, which must be equal on all ranks.
        env: how the process was launched.
        topology: rank arithmetic.
        backend: of this rank's device.
        owns_group: whether the default `torch.distributed` group is made here.
    """
    progress = Progress()
    lifeline, key = _open_lifeline(config, env, progress, owns_group)
    if lifeline is None:
        carrier: HostTransport | LoopbackTransport = LoopbackTransport(to_host=backend.view)
        transport: Any = carrier
    else:
        carrier = HostTransport(
            env.rank,
            env.world_size,
            lifeline,
            backend.view,
            backend.is_ready,
            key=key,
            address=lifeline.address,
        )
        _check_configs(config, env, backend, Objects(carrier, DATA))
        transport = _open_transport(config, carrier, lifeline, topology, backend)
    transport.make_groups(list(dict.fromkeys((*_groups(topology), *topology.sdp_groups()))))
    if topology.sdp > 1 and config.sdp_hierarchical_allgather and transport is carrier:
        _gather_by_host(carrier, env, topology)
    data, state, users = Objects(carrier, DATA), Objects(carrier, STATE), Objects(carrier)
    return Connection(transport, data, state, users, lifeline, owns_group, progress)


def _open_lifeline(
    config: Config, env: LaunchEnv, progress: Progress, owns_group: bool
) -> tuple[Lifeline | None, bytes]:
    """Waits for all ranks, then watches over them; the default group is made under its eyes.

    Returns:
        The lifeline, and the key by which the ranks of this session know each other.
    """
    store: dist.Store = dist.HashStore()
    lifeline, key = None, b""
    if env.world_size > 1:
        timeout_s = config.init_timeout_s
        store = session_store(env, timeout_s)
        call_roll(store, env.rank, env.world_size, __version__, timeout_s)
        trust = agree_on_key(
            store, env.rank, env.world_size, env.secret, env.runtime_dir, timeout_s
        )
        key = trust.key
        prepare_gloo(interface_for(trust.is_one_host, env.master_addr))
        lifeline = Lifeline(
            env.rank,
            env.world_size,
            store,
            key=key,
            is_one_host=trust.is_one_host,
            connect_timeout_s=timeout_s,
            progress=progress,
            stall_timeout_s=config.stall_timeout_s,
        )
    if owns_group:
        try:
            with without_gloos_lines():
                dist.init_process_group(
                    "gloo",
                    store=store,
                    rank=env.rank,
                    world_size=env.world_size,
                    timeout=GROUP_TIMEOUT,
                )
        except Exception as error:
            if lifeline is not None:
                lifeline.report("torch.distributed.init_process_group", error)
            raise
    return lifeline, key


def _gather_by_host(host: Any, env: LaunchEnv, topology: Topology) -> None:
    """Lets gathers of parameters go across hosts first; every rank calls it."""
    # The first rank on each rank's host stands for it: launchers fill host by host.
    first = env.rank - env.local_rank
    hosts = Objects(host, DATA).allgather(first, topology.world_group())
    groups = sorted({topology.sdp_group(rank) for rank in range(topology.size)})
    found = host.gather_by_host(groups, hosts)
    if found and env.rank == 0:
        log.get_logger().info(
            "%d of %d groups that hold parameters together gather across hosts, then inside each.",
            len(found),
            len(groups),
        )


def _open_transport(
    config: Config, host: HostTransport, lifeline: Lifeline, topology: Topology, backend: Backend
) -> Transport:
    """What carries tensors: the host transport itself, or programs beside it."""
    on_device = config.transport != "host" and backend.reaches(host.world_size)
    if config.transport != "xla" and not on_device:
        return host
    runner = backend.open_runner(host, lifeline.address)
    return XlaTransport(host, runner, topology.groups(CommGroup.PP_GROUP), spec_of=backend.spec)


def _check_configs(config: Config, env: LaunchEnv, backend: Backend, objects: Objects) -> None:
    """Raises on every rank if any two ranks have different configurations, or backends."""

    def problem(others: list[int], first: dict[str, Any], other: dict[str, Any]) -> str:
        difference = "".join(
            f"{name}: {value!r} on rank 0, {other[name]!r} on rank {others[0]}\n"
            for name, value in first.items()
            if value != other[name]
        )
        return (
            f"ranks 0 and {others[0]} were started with different configurations:\n{difference}"
            f"Give smp.init the same configuration on all ranks, in the same environment."
        )

    own = {**config.as_dict(), "MPXLA_DEVICE": backend.name}
    agreed(objects, range(env.world_size), own, problem)


def make_process_groups(topology: Topology, rank: int) -> dict[CommGroup, dist.ProcessGroup]:
    """torch.distributed groups for the getters; a collective call over all ranks."""
    with without_gloos_lines():
        made = {r: cast(dist.ProcessGroup, dist.new_group(list(r))) for r in _groups(topology)}
    return {
        kind: made[ranks] for kind in CommGroup for ranks in topology.groups(kind) if rank in ranks
    }


def _groups(topology: Topology) -> list[Group]:
    """Groups of all kinds, each once."""
    return list(dict.fromkeys(ranks for kind in CommGroup for ranks in topology.groups(kind)))
