"""The one process-wide value: configuration, launch, topology, device and transport.

`init` makes it, `shutdown` drops it, `current` gives it. Nothing else in mpxla is global, except
tags on modules (`parallel/tags.py`), which exist before `init`, and the launcher's store and the
failure at the exit of the process, which outlive a session.
"""

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from mpxla import log
from mpxla.comm.lifeline import Lifeline
from mpxla.comm.objects import Objects
from mpxla.comm.stall import Progress
from mpxla.comm.store import claims_in, open_agent_store
from mpxla.comm.transport import Group
from mpxla.config import Config
from mpxla.config_sources import resolve
from mpxla.connection import connect, make_process_groups
from mpxla.delayed import delay_all_models
from mpxla.device.backend import Backend
from mpxla.device.choice import open_backend
from mpxla.env import LaunchEnv, prepare_xla, read_environment
from mpxla.errors import MpxlaError
from mpxla.kept import Kept, open_kept
from mpxla.schedule.choice import placement_of
from mpxla.topology import CommGroup, Topology
from mpxla.uncaught import UncaughtErrors, show_in_notebook

if TYPE_CHECKING:
    from mpxla.parallel.models import Models

__all__ = [
    "Session",
    "current",
    "current_models",
    "init",
    "is_initialized",
    "show_uncaught",
    "shutdown",
    "shutdown_if_started",
]

_failed_at_exit = threading.Event()


@dataclass
class Session:
    """Everything that holds from `init` to `shutdown`.

    Attributes:
        config: the resolved configuration.
        env: how the process was launched.
        topology: rank arithmetic.
        backend: compiles and runs programs on this rank's device.
        transport: moves tensors between ranks.
        objects: moves data of mpxla's own between ranks.
        state_objects: moves states of models and optimizers, with the user's objects in them.
        user_objects: moves what the user sends: anything that can be pickled.
        lifeline: knows who is alive; None in a world of one.
        process_groups: `torch.distributed` group of every kind of group.
        models: the distributed models, once there is one.
        pending_checkpoint: the checkpoint that is being written in the background, if any.
        owns_default_group: whether `init` made the default `torch.distributed` group.
        progress: what this rank is doing, for the table when nothing moves.
        recorder: notes what runs when, while a profile is taken.
        excepthooks: `sys.excepthook` as it was before `init`, and as `init` left it.
        exchanged: what packages have from mpxla until `shutdown`; closing it undoes it.
        kept: what earlier starts of the job left on disk.
    """

    config: Config
    env: LaunchEnv
    topology: Topology
    backend: Backend
    transport: Any
    objects: Objects
    state_objects: Objects
    user_objects: Objects
    lifeline: Lifeline | None
    process_groups: dict[CommGroup, dist.ProcessGroup] = field(default_factory=dict)
    models: "Models | None" = None
    pending_checkpoint: Any = None
    owns_default_group: bool = True
    progress: Progress = field(default_factory=Progress)
    recorder: Any = None
    excepthooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    exchanged: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    kept: Kept = field(default_factory=Kept)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.backend.device

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.env.rank

    @contextlib.contextmanager
    def gathering(self, what: str, ranks: Group) -> Generator[None]:
        """Around an exchange that takes long, so that the table of a stall names it.

        Every rank of the group calls it.

        Args:
            what: for the error.
            ranks: global ranks.
        """
        with self.progress.meeting(what):
            self.objects.barrier(ranks)
        with self.progress.busy(what):
            yield

    def has_reduced(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether steps reduce the gradients of an optimizer's parameters over replicas."""
        given = [p for group in optimizer.param_groups for p in group["params"]]
        return self.models is not None and bool(self.models.holding(given))

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


def current_models() -> "Models | None":
    """The distributed models; None before the first one, and where there is no session."""
    return None if _session is None else _session.models


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
        PeerFailure: a rank did not come within `init_timeout_s`; names those that did.
        RankMismatch: ranks were started with different configurations or versions of mpxla.
    """
    global _session
    if _session is not None:
        log.get_logger().warning("smp.init() was called again; the second call changes nothing.")
        return
    env = read_environment()
    prepare_xla()  # again: scripts set variables of torch_xla after they have imported mpxla
    log.set_rank(env.rank, env.world_size)
    log.set_level(env.log_level)
    earlier_hook = sys.excepthook
    shown = show_uncaught(env)
    show_in_notebook(shown or UncaughtErrors(is_complete=env.log_level == "DEBUG"))
    resolved = resolve(config, env)
    resolved.check_world_size(env.world_size)
    num_batches = 1 if resolved.prescaled_batch else resolved.tensor_parallel_degree
    placement_of(resolved.for_batches(num_batches))  # refuses a schedule that cannot run
    topology = Topology(
        env.world_size,
        resolved.pipeline_parallel_degree,
        resolved.tensor_parallel_degree,
        resolved.placement_strategy,
        resolved.sharding_degree(env.world_size),
    )
    with log.root_logger_kept():
        backend, kept = _open_device(resolved, env)
    owns_group = not dist.is_initialized()
    connection = connect(resolved, env, topology, backend, owns_group)
    session = Session(resolved, env, topology, backend, **connection._asdict(), kept=kept)
    _reach_all_processes(session)
    if resolved.ddp:
        session.process_groups = make_process_groups(topology, env.rank)
    _session = session
    delay_all_models(resolved.delayed_parameter_initialization)
    if shown is not None:
        store = _get_default_store()
        shown.claim = claims_in(lambda: store, env.rank)
    # torch.distributed replaces the hook as well, to write the rank.
    sys.excepthook = _reporting(sys.excepthook if shown is None else shown)
    _session.excepthooks = earlier_hook, sys.excepthook
    atexit.register(_shutdown_at_exit)


def _open_device(config: Config, env: LaunchEnv) -> tuple[Backend, Kept]:
    """The backend that the configuration or the environment names, and what earlier starts left."""
    backend = open_backend(env, config.device)
    _ = backend.device  # claims it, before the first host backward (see `current_device`)
    folder = config.compile_cache
    folder = f"{env.cache_dir}/mpxla/programs" if folder is None else folder
    kept = open_kept(folder, backend.machine)
    if not backend.keep_programs(kept) and config.compile_cache:
        log.get_logger().warning(
            "compile_cache keeps no compiled programs of %s, only how steps are cut and lowered; "
            'device: "pjrt" keeps programs, too.',
            backend.name,
        )
    return backend, kept


def show_uncaught(env: LaunchEnv, is_complete: bool = False) -> UncaughtErrors | None:
    """Lets mpxla show errors that end the script, unless somebody else does already.

    Args:
        env: of this process.
        is_complete: show all frames on all ranks.

    Returns:
        What shows them; None if it is somebody else's.
    """
    if isinstance(sys.excepthook, UncaughtErrors):
        sys.excepthook.rank, sys.excepthook.world_size = env.rank, env.world_size
        return sys.excepthook
    if sys.excepthook is not sys.__excepthook__:
        return None
    shown = UncaughtErrors(env.rank, env.world_size, is_complete or env.log_level == "DEBUG")
    if env.has_agent_store:
        place = env.master_addr, env.master_port
        shown.claim = claims_in(lambda: open_agent_store(*place), env.rank)
    sys.excepthook = shown
    return shown


def _reach_all_processes(session: Session) -> None:
    """Collectives on tensors of the device mean the processes of the job."""
    env, transport = session.env, session.transport
    host = getattr(transport, "host", transport)
    undo = session.backend.join_world(host, env.local_rank, env.local_size, session.has_reduced)
    session.exchanged.callback(undo)


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
    atexit.unregister(_shutdown_at_exit)
    delay_all_models(False)
    if session.excepthooks is not None and sys.excepthook is session.excepthooks[1]:
        sys.excepthook = session.excepthooks[0]
    try:
        with session.progress.busy("smp.shutdown"):
            _end(session)
    except MpxlaError as error:
        session.report_failure("the end of the session", error)
        raise
    finally:
        session.exchanged.close()
        _disconnect(session)


def _end(session: Session) -> None:
    """Finishes what is under way."""
    if session.pending_checkpoint is not None:
        session.pending_checkpoint.wait()
    if session.models is not None:
        session.models.end_training()


def _disconnect(session: Session) -> None:
    """Drops everything; a rank that fell silent meanwhile is an error."""
    try:
        session.transport.close()
        if session.lifeline is not None:
            session.lifeline.close()
    finally:
        if session.owns_default_group and dist.is_initialized():
            dist.destroy_process_group()
        log.forget_warnings()


def _shutdown_at_exit() -> None:
    """`shutdown` at the end of the process, which nobody could catch an error of."""
    try:
        shutdown_if_started()
    except BaseException:
        traceback.print_exc()
        _failed_at_exit.set()


@atexit.register  # before the session's own, so it is called after them
def _exit_with_failure() -> None:
    """Python would end with code 0, and the launcher would leave the other ranks alone."""
    if _failed_at_exit.is_set():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)
