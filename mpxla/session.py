"""The one process-wide value: configuration, launch, topology, device and transport.

`init` makes it, `shutdown` drops it, `current` gives it. Nothing else in mpxla is global, except
tags on modules (`parallel/tags.py`), which exist before `init`, and the launcher's store, which
outlives a session.
"""

import atexit
import contextlib
import itertools
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from mpxla import log
from mpxla.comm.host import HostTransport
from mpxla.comm.lifeline import Lifeline
from mpxla.comm.loopback import LoopbackTransport
from mpxla.comm.objects import Objects
from mpxla.comm.stall import Progress
from mpxla.comm.transport import Group, Transport
from mpxla.comm.xla import XlaTransport
from mpxla.comm.xla_cpu import CpuRunner
from mpxla.comm.xla_device import DeviceRunner, is_device_world
from mpxla.comm.xla_queue import Runner
from mpxla.config import Config, describe_difference, resolve
from mpxla.env import LaunchEnv, read_environment
from mpxla.errors import MpxlaError, PeerFailure, RankMismatch
from mpxla.schedule.choice import placement_of
from mpxla.stage.delayed import delay_all_models
from mpxla.stage.device import current_device, host_view
from mpxla.topology import CommGroup, Topology

if TYPE_CHECKING:
    from mpxla.parallel.models import Models

__all__ = ["Session", "current", "init", "is_initialized", "shutdown", "shutdown_if_started"]

_RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
_launch_stores: dict[str, dist.Store] = {}
_session_numbers = itertools.count()


@dataclass
class Session:
    """Everything that holds from `init` to `shutdown`.

    Attributes:
        config: the resolved configuration.
        env: how the process was launched.
        topology: rank arithmetic.
        device: this rank's device.
        transport: moves tensors between ranks.
        objects: moves picklable objects between ranks.
        lifeline: knows who is alive; None in a world of one.
        process_groups: `torch.distributed` group of every kind of group.
        models: the distributed models, once there is one.
        pending_checkpoint: the checkpoint that is being written in the background, if any.
        owns_default_group: whether `init` made the default `torch.distributed` group.
        progress: what this rank is doing, for the table when nothing moves.
        recorder: notes what runs when, while a profile is taken.
        excepthooks: `sys.excepthook` as it was before `init`, and as `init` left it.
    """

    config: Config
    env: LaunchEnv
    topology: Topology
    device: torch.device
    transport: Any
    objects: Objects
    lifeline: Lifeline | None
    process_groups: dict[CommGroup, dist.ProcessGroup] = field(default_factory=dict)
    models: "Models | None" = None
    pending_checkpoint: Any = None
    owns_default_group: bool = True
    progress: Progress = field(default_factory=Progress)
    recorder: Any = None
    excepthooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.env.rank

    @contextlib.contextmanager
    def gathering(self, what: str, ranks: Group) -> Generator[None]:
        """Around an exchange that takes long: ranks that do not come to it end the job.

        Every rank of the group calls it. A rank that does not within `stall_timeout_s` is a
        failure, as in a step; the exchange itself takes what time it takes.

        Args:
            what: for the error.
            ranks: global ranks.
        """
        with self.progress.meeting(what):
            self.objects.barrier(ranks)
        with self.progress.busy():
            yield

    def report_failure(self, where: str, error: BaseException) -> None:
        """Tells all other ranks that this one cannot go on."""
        if self.lifeline is not None:
            self.lifeline.report(where, error)


_session: Session | None = None


def current() -> Session:
    """The session.

    Raises:
        MpxlaError: `init` has not been called.
    """
    if _session is None:
        raise MpxlaError("smp.init() has not been called; call it first in the script.")
    return _session


def is_initialized() -> bool:
    """Whether `init` ran in this process."""
    return _session is not None


def init(config: dict[str, Any] | None = None) -> None:
    """Starts mpxla; every process of the job calls it first in the script.

    Settings come from the launcher (`SM_HP_MP_PARAMETERS`, `MPXLA_CONFIG`), then from `config`,
    then from defaults. Creates the default `torch.distributed` process group if there is none. A
    second call warns and changes nothing. (SMP API reference, "Initialization".)

    Args:
        config: values for keys that the launcher does not set.

    Raises:
        ConfigError: unknown keys or refused values; all problems at once.
        ScheduleError: the text in `schedule` cannot run.
        TopologyError: the number of processes does not fit the degrees.
        RankMismatch: ranks were started with different configurations.
    """
    global _session
    if _session is not None:
        log.get_logger().warning("smp.init() was called again; the second call changes nothing.")
        return
    env = read_environment()
    log.set_rank(env.rank, env.world_size)
    log.set_level(env.log_level)
    resolved = resolve(config, env)
    resolved.check_world_size(env.world_size)
    placement_of(resolved)  # refuses a schedule that cannot run
    topology = Topology(
        env.world_size,
        resolved.pipeline_parallel_degree,
        resolved.tensor_parallel_degree,
        resolved.placement_strategy,
    )
    device = current_device()
    earlier_hook = sys.excepthook  # torch.distributed replaces it as well
    owns_group = not dist.is_initialized()
    if owns_group:
        _start_process_group(env)
    _session = _connect(resolved, env, topology, device, owns_group)
    delay_all_models(resolved.delayed_parameter_initialization)
    sys.excepthook = _reporting(sys.excepthook)
    _session.excepthooks = earlier_hook, sys.excepthook
    atexit.register(shutdown_if_started)


def _start_process_group(env: LaunchEnv) -> None:
    """The default gloo group, by the file of a test runner, the launcher's store, or alone."""
    if env.world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        # A store keeps the keys of an earlier session, and torchrun's those of processes that it
        # has restarted; all ranks count alike.
        name = f"mpxla_session_{env.attempt}_{next(_session_numbers)}"
        store = dist.PrefixStore(name, _launch_store(env))
    dist.init_process_group(
        "gloo", store=store, rank=env.rank, world_size=env.world_size, timeout=_RENDEZVOUS_TIMEOUT
    )


def _launch_store(env: LaunchEnv) -> dist.Store:
    """Where the processes of a launch meet; one object per process, since rank 0 may serve it."""
    place = env.rendezvous_file or f"tcp://{env.master_addr}:{env.master_port}"
    if place not in _launch_stores:
        _launch_stores.clear()
        if env.rendezvous_file is not None:
            store: dist.Store = dist.FileStore(env.rendezvous_file, env.world_size)
        else:
            store, _, _ = next(
                dist.rendezvous(place, env.rank, env.world_size, timeout=_RENDEZVOUS_TIMEOUT)
            )
        _launch_stores[place] = store
    return _launch_stores[place]


def _connect(
    config: Config, env: LaunchEnv, topology: Topology, device: torch.device, owns_group: bool
) -> Session:
    progress = Progress()
    if env.world_size == 1:
        transport: Any = LoopbackTransport()
        lifeline = None
        objects = Objects(transport)
    else:
        store = _get_default_store()
        lifeline = Lifeline(
            env.rank,
            env.world_size,
            store,
            progress=progress,
            stall_timeout_s=config.stall_timeout_s,
        )
        host = HostTransport(env.rank, env.world_size, lifeline, host_view)
        objects = Objects(host)
        _check_configs(config, env, objects)
        transport = _open_transport(config, host, lifeline, topology)
    group_lists = {kind: topology.groups(kind) for kind in CommGroup}
    unique = dict.fromkeys(g for groups in group_lists.values() for g in groups)
    transport.make_groups(list(unique))
    session = Session(
        config,
        env,
        topology,
        device,
        transport,
        objects,
        lifeline,
        owns_default_group=owns_group,
        progress=progress,
    )
    if config.ddp:
        session.process_groups = _make_process_groups(group_lists, list(unique), env.rank)
    return session


def _open_transport(
    config: Config, host: HostTransport, lifeline: Lifeline, topology: Topology
) -> Transport:
    """What carries tensors: the host transport itself, or programs beside it."""
    on_device = config.transport != "host" and is_device_world(host.world_size)
    if config.transport != "xla" and not on_device:
        return host
    if on_device:
        runner: Runner = DeviceRunner(host.rank, host.world_size)
    else:
        runner = CpuRunner(host, lifeline.address)
    return XlaTransport(host, runner, topology.groups(CommGroup.PP_GROUP))


def _check_configs(config: Config, env: LaunchEnv, objects: Objects) -> None:
    """Raises on every rank if any two ranks have different configurations."""
    world = tuple(range(env.world_size))
    everyone = objects.allgather((config.fingerprint(), config.as_dict()), world)
    for rank, (text, values) in enumerate(everyone):
        if text != everyone[0][0]:
            with contextlib.suppress(PeerFailure):
                objects.barrier(world)  # nobody ends before all others know as much
            difference = describe_difference(everyone[0][1], values, "rank 0", f"rank {rank}")
            raise RankMismatch(
                f"ranks 0 and {rank} were started with different configurations:\n{difference}\n"
                f"Give smp.init the same configuration on all ranks."
            )


def _make_process_groups(
    group_lists: dict[CommGroup, Any], unique: list[tuple[int, ...]], rank: int
) -> dict[CommGroup, dist.ProcessGroup]:
    """torch.distributed groups for the getters; a collective call over all ranks."""
    made = {r: cast(dist.ProcessGroup, dist.new_group(list(r))) for r in unique}
    return {
        kind: made[ranks]
        for kind, groups in group_lists.items()
        for ranks in groups
        if rank in ranks
    }


def _reporting(previous: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that tells the other ranks of an uncaught exception before the process ends."""

    def report(kind: Any, error: BaseException, trace: Any) -> None:
        previous(kind, error, trace)
        if _session is not None:
            _session.report_failure("the training script", error)

    return report


def shutdown() -> None:
    """Ends mpxla in this process: waits for messages under way and drops the session.

    Called by itself at the end of the process. Afterwards `init` may be called again. Replicas
    wait for each other here.

    Raises:
        CheckpointError: a checkpoint that was being written in the background has failed.
        MpxlaError: `init` has not been called.
        RankMismatch: replicas had different numbers of training steps.
    """
    current()
    shutdown_if_started()


def shutdown_if_started() -> None:
    """`shutdown`, or nothing where there is no session."""
    global _session
    session, _session = _session, None
    if session is None:
        return
    atexit.unregister(shutdown_if_started)
    delay_all_models(False)
    if session.excepthooks is not None and sys.excepthook is session.excepthooks[1]:
        sys.excepthook = session.excepthooks[0]
    try:
        if session.pending_checkpoint is not None:
            session.pending_checkpoint.wait()
        if session.models is not None:
            session.models.end_training()
    except MpxlaError as error:
        session.report_failure("the end of the session", error)
        raise
    finally:
        session.transport.close()
        if session.lifeline is not None:
            session.lifeline.close()
        if session.owns_default_group and dist.is_initialized():
            dist.destroy_process_group()
        log.forget_warnings()
