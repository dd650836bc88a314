"""Starts rank processes for tests, fast where possible.

Importing torch, torch_xla and mpxla takes seconds of every process. So a *zygote*, a fresh
interpreter that has imported them and has done nothing else, forks the ranks: it has one thread and
no XLA client, which makes forking it safe, while forking the test process would not be.

    test process --(environment, descriptors)--> zygote --fork--> rank 0, rank 1, ...
                 <--(process id, exit code)-----

There is one for every backend, which has imported that. A rank that needs further environment
variables gets an interpreter of its own, because some are read while modules are imported.
"""

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

from mpxla.collection import collection_paused

__all__ = [
    "LATE_ENVIRON",
    "RANK_ENVIRON",
    "Process",
    "become_zygote",
    "fork_process",
    "start_process",
    "stop_zygotes",
    "xla_flags_of_ranks",
]

_PRELOADED = (
    *("torch", "torch.export", "mpxla.api", "mpxla.parallel.model", "mpxla.parallel.optimizer"),
    *("mpxla.runtime.plans.plan", "mpxla.comm.host", "pytest", "scipy.optimize", "torchvision"),
    "transformers.modeling_utils",
)
"""What nearly every rank imports: these modules import most of mpxla, and tests import pytest.
Many import transformers, and the launcher patches what is imported already as well."""
_BACKENDS = {
    "pjrt": ("mpxla.device.pjrt.backend",),
    "": ("torch_xla", "mpxla.device.torch_xla.backend", "jax", "mpxla.device.cpu_world"),
}
"""What ranks import of a backend, by the variable that names it; jax is for collectives."""
LATE_ENVIRON = frozenset({"MPXLA_DEVICE", "MPXLA_EAGER", "XDG_CACHE_HOME", "XLA_FLAGS"})
"""Variables that nobody reads before `smp.init`, or before the first use of a device."""
RANK_ENVIRON = {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU"}
"""What every rank process has from the start: one core each, and the device that is everywhere."""
_UNOPTIMIZED = "--xla_backend_optimization_level=0"
_OLD_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
_MAX_ORDER_BYTES = 1 << 17
_COMMAND = "from mpxla.tests.ranks.worker import main; main()"


class Process(Protocol):
    """A started rank process, the leader of a process group of its own."""

    pid: int
    waitable: int
    """Descriptor that is readable once the process has ended."""

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal, or None while it runs."""
        ...

    def release(self) -> None:
        """Waits for the end and closes the descriptor."""
        ...


class _Order(NamedTuple):
    """What the zygote is told about the process to fork."""

    mode: str
    environ: dict[str, str]
    path: list[str]
    folder: str


class _OwnProcess:
    """A process with an interpreter of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid
        self.waitable = os.pidfd_open(process.pid)

    def poll(self) -> int | None:
        if self._process.returncode is None and select.select([self.waitable], [], [], 0)[0]:
            _kill_group(self.pid)
        return self._process.poll()

    def release(self) -> None:
        select.select([self.waitable], [], [])
        self.poll()
        os.close(self.waitable)


class _ForkedProcess:
    """A process that the zygote has forked, and reaps."""

    def __init__(self, pid: int, waitable: int) -> None:
        self.pid = pid
        self.waitable = waitable
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        if self._exit_code is None and select.select([self.waitable], [], [], 0)[0]:
            # No text: the zygote itself was killed, and its children end with the connection.
            self._exit_code = int(os.read(self.waitable, 16) or -signal.SIGKILL)
        return self._exit_code

    def release(self) -> None:
        select.select([self.waitable], [], [])
        self.poll()
        os.close(self.waitable)


class _Zygote:
    """The test process's end of the zygote."""

    def __init__(self, device: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**os.environ, **RANK_ENVIRON, "MPXLA_DEVICE": device, "USE_TORCH_XLA": "0"}
        self._process = _popen(theirs.fileno(), "zygote", environ, None, None)
        theirs.close()

    def fork(
        self, connection: int, mode: str, environ: Mapping[str, str], files: Sequence[BinaryIO]
    ) -> Process:
        order = pickle.dumps(_Order(mode, dict(environ), sys.path, os.getcwd()))
        assert len(order) <= _MAX_ORDER_BYTES, "the environment is too large"
        status, theirs = os.pipe()
        descriptors = [connection, *(file.fileno() for file in files), theirs]
        socket.send_fds(self._control, [order], descriptors)
        os.close(theirs)
        pid = self._control.recv(64)
        if not pid:
            os.close(status)
            raise RuntimeError("the process that starts ranks has died; see standard error")
        return _ForkedProcess(int(pid), status)

    def stop(self) -> None:
        self._control.close()
        self._process.wait()


_zygotes: dict[str, _Zygote] = {}
"""By their backend."""


def xla_flags_of_ranks(flags: str) -> str:
    """The flags of ranks where those of the test process are `flags`.

    XLA's newer emitters go through MLIR, which is a fifth to a quarter of what a rank of a test
    costs. Where nothing is optimized, and so for speed of compilation only, ranks do without them;
    operators that are tried in the test process, and scripts, are compiled as they always are.
    """
    is_fast = _UNOPTIMIZED in flags and "xla_cpu_use_fusion_emitters" not in flags
    return f"{flags} {_OLD_EMITTERS}" if is_fast else flags


def fork_process(
    connection: int, mode: str, environ: Mapping[str, str], files: Sequence[BinaryIO]
) -> Process:
    """Starts a rank process out of its backend's zygote, and that if there is none.

    Args:
        connection: Descriptor of the process's end of its connection; the caller closes it.
        mode: `pool` or `once`; see `worker.main`.
        environ: The whole environment.
        files: For standard output and standard error.
    """
    device = environ.get("MPXLA_DEVICE", "")
    device = device if device in _BACKENDS else ""
    if device not in _zygotes:
        _zygotes[device] = _Zygote(device)
    return _zygotes[device].fork(connection, mode, environ, files)


def start_process(
    connection: int, mode: str, environ: Mapping[str, str], files: Sequence[BinaryIO]
) -> Process:
    """Starts a rank process with an interpreter of its own; arguments as for `fork_process`."""
    return _OwnProcess(_popen(connection, mode, environ, *files))


def stop_zygotes() -> None:
    """Ends the zygotes; the next `fork_process` starts another one."""
    while _zygotes:
        _, zygote = _zygotes.popitem()
        zygote.stop()


def _popen(
    descriptor: int, mode: str, environ: Mapping[str, str], stdout: Any, stderr: Any
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", _COMMAND, str(descriptor), mode],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env={
            **environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        },
        pass_fds=[descriptor],
        start_new_session=True,
    )


def become_zygote(descriptor: int) -> tuple[int, str]:
    """Serves orders until the test process is gone. Returns in every forked child only.

    Args:
        descriptor: The zygote's end of the control socket.

    Returns:
        Descriptor of the child's connection, and its mode.
    """
    control = socket.socket(fileno=descriptor)
    for name in (*_PRELOADED, *_BACKENDS[os.environ["MPXLA_DEVICE"]]):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _warm_up()
    # Collections in the children, the last of all at their end, need not visit the modules again.
    gc.collect()
    gc.freeze()
    with collection_paused():  # counts what is frozen, which the children then need not
        pass
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"{num_threads} threads after imports: forking would lose all but one"
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([control, woken], [], [])
        if woken in readable:
            woken.recv(4096)
            _reap(statuses)
        if control not in readable:
            continue
        data, received, _, _ = socket.recv_fds(control, _MAX_ORDER_BYTES, 4)
        if not data:
            os._exit(0)
        connection, stdout, stderr, status = received
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            for inherited in [control, woken, waker]:
                inherited.close()
            for inherited in [status, *statuses.values()]:
                os.close(inherited)
            return connection, _settle(pickle.loads(data), stdout, stderr)
        statuses[pid] = status
        for passed in [connection, stdout, stderr]:
            os.close(passed)
        control.send(str(pid).encode())


def _warm_up() -> None:
    """Captures and lowers a small step, and traces an update, as most ranks do.

    PyTorch registers and remembers much when it first does so, which the children then need not. No
    derivative is computed: after that, children of this process could compute none.
    """
    import torch
    import tqdm
    from torch import nn

    from mpxla.cli.factory import capture_factory
    from mpxla.graph.split import split_stages
    from mpxla.stage.lower import TracedStage
    from mpxla.tests.device.null import plain_lowering

    tqdm.tqdm.monitor_interval = 0  # torch has progress bars, whose thread could not be forked
    state = torch.random.get_rng_state()
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    step = capture_factory(model, (torch.zeros(2, dtype=torch.int64),), torch.sum)
    nodes = [node for node in step.graph.nodes if node.op == "call_function"]
    (stage,) = split_stages(step, {node: (0,) for node in nodes}, 1)
    TracedStage(stage, False, plain_lowering()).lowered()
    torch.random.set_rng_state(state)


def _reap(statuses: dict[int, int]) -> None:
    """Tells the test process the exit codes of children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            _kill_group(ended.si_pid)
            pid, status = os.waitpid(ended.si_pid, 0)
            descriptor = statuses.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(descriptor)


def _kill_group(pid: int) -> None:
    """Ends what a process has left behind; to be called before it is reaped and its id is free."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _settle(order: _Order, stdout: int, stderr: int) -> str:
    """Makes a forked child what a started process would be."""
    os.setsid()
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.chdir(order.folder)
    sys.path[:] = order.path
    os.environ.clear()
    os.environ.update(order.environ)
    return order.mode
