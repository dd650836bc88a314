"""Reads the environment: who this process is among its peers, and what the launcher configured.

This is the only reader of `os.environ` in mpxla, so that everything else can be tested with plain
values. It understands torchrun, Open MPI's mpirun and a process started by hand. It must not import
torch, and it does not judge configuration keys (`config` does).
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpxla.errors import ConfigError

__all__ = [
    "ROUNDING_VARIABLE",
    "LaunchEnv",
    "compiler_flags",
    "cores_per_process",
    "environment",
    "prepare_gloo",
    "prepare_xla",
    "read_environment",
    "reads_variables",
    "set_variables",
    "share_cores",
    "xla_threads",
]

XLA_FLAG = "--xla_cpu_use_xnnpack=false"
"""See `prepare_xla`."""
_DOWNCASTS = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
"""Deprecated variables of torch_xla: every float32 tensor is bfloat16 on the device."""
ROUNDING_VARIABLE = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
"""Tells Neuron's runtime to round stochastically."""
_DOWNCAST_KEPT = "MPXLA_DOWNCAST"
"""Where `prepare_xla` leaves the name of the one that was set."""
_DEFAULT_MASTER_PORT = 29500
_SHORTEST_SECRET = 32
# Meaning of the variable -> its name under torchrun and under mpirun.
_TORCHRUN = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
}
_MPIRUN = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "world_size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class LaunchEnv:
    """What the environment says about this process. The defaults describe a single process."""

    rank: int = 0
    """Global rank."""
    world_size: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Rank among the processes of this node."""
    local_size: int = 1
    """Number of processes on this node."""
    master_addr: str = "127.0.0.1"
    """Host of rank 0."""
    master_port: int = _DEFAULT_MASTER_PORT
    """Port for the rendezvous on that host."""
    attempt: int = 0
    """How often torchrun has restarted the processes (`--max-restarts`)."""
    source: str = "none"
    """Who started the process: `"torchrun"`, `"mpirun"` or `"none"`."""
    smp_parameters: Mapping[str, Any] | None = None
    """Configuration in `SM_HP_MP_PARAMETERS`, where SageMaker puts it."""
    mpxla_config: Mapping[str, Any] | None = None
    """Configuration in `MPXLA_CONFIG`: JSON text, or the path of a JSON file."""
    device: str | None = None
    """`MPXLA_DEVICE`: name of the backend to use; None leaves it to the configuration."""
    cache_dir: str = "~/.cache"
    """`XDG_CACHE_HOME`: the user's folder for what can be made again."""
    asks_for_cuda: bool = False
    """`PJRT_DEVICE` names CUDA, or names nothing and jax's plugin is installed: programs are to run
    on a CUDA device, which torch_xla 2.9 has none of."""
    asks_for_torch_xla: bool = False
    """`PJRT_DEVICE` names another device than CUDA, or names nothing and a library is installed for
    accelerators that torch_xla runs on."""
    rendezvous_file: str | None = None
    """`MPXLA_RENDEZVOUS_FILE`: file over which processes find each other, in place of a port."""
    secret: str | None = dataclasses.field(default=None, repr=False)
    """`MPXLA_SECRET`: what the processes of the job know, and nobody else."""
    runtime_dir: str | None = None
    """`XDG_RUNTIME_DIR`: a folder of this user for files of running programs."""
    has_agent_store: bool = False
    """Whether the launcher serves the store at the master's port (torchrun does)."""
    downcast: str | None = None
    """`XLA_USE_BF16` or `XLA_DOWNCAST_BF16`, if it is switched on: means `bf16: True`."""
    rounds_stochastically: bool = False
    """`NEURON_RT_STOCHASTIC_ROUNDING_EN` is on, and the device is none of Neuron, whose runtime
    reads it."""
    log_level: str = "INFO"
    """Level for `mpxla.log.set_level`."""


def environment() -> MutableMapping[str, str]:
    """All variables of this process, as they are at any time."""
    return os.environ


def reads_variables(value: object, attributes: Sequence[str]) -> bool:
    """Whether code that takes attributes of a value, or calls it, reads variables."""
    if value is os:
        return attributes[:1] in (["environ"], ["getenv"])
    return value is os.getenv


def read_environment(environ: Mapping[str, str] | None = None) -> LaunchEnv:
    """Reads everything that mpxla takes from the environment. A blank variable counts as not set.

    Args:
        environ: Variables to read; `os.environ` if None.

    Returns:
        The description of this process.

    Raises:
        ConfigError: Variables are missing, contradict each other or cannot be read. The text lists
            all problems of the launcher's variables.
    """
    environ = os.environ if environ is None else environ
    environ = {name: text.strip() for name, text in environ.items() if text.strip()}
    return LaunchEnv(
        **_read_processes(environ),
        smp_parameters=_read_json(environ, "SM_HP_MP_PARAMETERS", may_be_path=False),
        mpxla_config=_read_json(environ, "MPXLA_CONFIG", may_be_path=True),
        device=_read_device(environ),
        cache_dir=environ.get("XDG_CACHE_HOME", "~/.cache"),
        asks_for_cuda=_asks_for_cuda(environ),
        asks_for_torch_xla=_asks_for_torch_xla(environ),
        rendezvous_file=environ.get("MPXLA_RENDEZVOUS_FILE"),
        secret=_read_secret(environ),
        runtime_dir=environ.get("XDG_RUNTIME_DIR"),
        has_agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        downcast=_read_downcast(environ),
        rounds_stochastically=_reads_rounding(environ),
        log_level=_read_log_level(environ),
    )


def prepare_xla(environ: MutableMapping[str, str] | None = None) -> None:
    """Sets what mpxla needs of XLA; flags take effect if no device has been used yet.

    torch_xla's lazily traced programs give the memory of a tensor that was changed in place to the
    result (`XLA_ENABLE_PARAM_ALIASING`), although other pending values, or a message on its way,
    may still need it: `norm = p.grad.norm(); p.grad.mul_(0.5)` and a step of the optimizer leave a
    `norm` that cannot be computed. Without it such a program needs memory for both.

    XLA's CPU backend of torch_xla 2.9 keeps packed copies of weights by address (XNNPACK), so that
    a parameter that is updated in place is multiplied with its old values.
    `test_bugs.py` shows it and fails when it is mended.

    `XLA_USE_BF16` and `XLA_DOWNCAST_BF16` would make float32 masters and sums bfloat16 behind
    mpxla's back, on the device only, so that messages have another type than programs expect. They
    are taken away from torch_xla, and mean the key `bf16: True`.

    Args:
        environ: Variables to change; `os.environ` if None.
    """
    environ = os.environ if environ is None else environ
    downcast = _read_downcast(environ)
    if downcast is not None:
        environ[_DOWNCAST_KEPT] = downcast
    for name in _DOWNCASTS:
        environ.pop(name, None)
    flags = environ.get("XLA_FLAGS", "")
    name = XLA_FLAG.partition("=")[0]
    if name not in flags:
        environ["XLA_FLAGS"] = f"{flags} {XLA_FLAG}".strip()
    environ.setdefault("XLA_ENABLE_PARAM_ALIASING", "0")


def _read_downcast(environ: Mapping[str, str]) -> str | None:
    """The variable that asks for bfloat16, now or before `prepare_xla`."""
    found = [name for name in _DOWNCASTS if environ.get(name, "0").lower() in ("1", "true")]
    return found[0] if found else environ.get(_DOWNCAST_KEPT)


def _reads_rounding(environ: Mapping[str, str]) -> bool:
    is_on = environ.get(ROUNDING_VARIABLE, "0").lower() in ("1", "true")
    has_neuron = importlib.util.find_spec("libneuronxla") is not None
    # Where nothing is named, torch_xla takes Neuron if it is there.
    return is_on and environ.get("PJRT_DEVICE", "NEURON" if has_neuron else "CPU") != "NEURON"


def set_variables(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Sets variables of this process; None removes one. Returns what they were before."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def compiler_flags() -> list[str]:
    """What the environment tells XLA, and so changes its programs."""
    return [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]


def cores_per_process(num_processes: int) -> int:
    """Threads for each of several processes: `OMP_NUM_THREADS` if it is set, else a fair share."""
    return _chosen_threads("OMP_NUM_THREADS") or _share_of_cores(num_processes)


def _share_of_cores(num_processes: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def _chosen_threads(name: str, environ: Mapping[str, str] | None = None) -> int:
    """What a variable says; 0 if it says no number."""
    chosen = (os.environ if environ is None else environ).get(name, "")
    return int(chosen) if chosen.isdecimal() else 0


def share_cores(num_processes: int, environ: MutableMapping[str, str] | None = None) -> None:
    """Lets XLA start as many threads on the CPU as this process has cores to itself.

    It would start one per core of the machine in every process, and they would take the cores from
    one another: steps of GPTs on two ranks and cores took 1.06 to 1.5 times as long. XLA reads
    `NPROC` when its client is made; one that is set stays.

    Args:
        num_processes: processes on this machine that share its cores, unless the launcher has bound
            them to cores.
        environ: Variables to change; `os.environ` if None.
    """
    environ = os.environ if environ is None else environ
    if num_processes > 1 and not _is_bound():
        environ.setdefault("NPROC", str(_share_of_cores(num_processes)))


def _is_bound() -> bool:
    """Whether this process may use other cores than the one that has started it."""
    with contextlib.suppress(OSError):
        return os.sched_getaffinity(0) != os.sched_getaffinity(os.getppid())
    return False


def xla_threads(environ: Mapping[str, str] | None = None) -> int:
    """Threads of the pool in which XLA's client for the CPU runs programs."""
    return _chosen_threads("NPROC", environ) or _share_of_cores(1)


def prepare_gloo(interface: str | None, environ: MutableMapping[str, str] | None = None) -> None:
    """Makes gloo listen on one network interface, unless the user has chosen some.

    Left to itself it takes the address that the host's name leads to. Process groups that exist
    already stay as they are.

    Args:
        interface: As in `lo`; None leaves the choice to gloo.
        environ: Variables to change; `os.environ` if None.
    """
    environ = os.environ if environ is None else environ
    if interface is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _read_processes(environ: Mapping[str, str]) -> dict[str, Any]:
    """Finds the launcher and reads its variables; no variables mean a single process."""
    required = [*_TORCHRUN.values(), *_MASTER]
    missing = [name for name in required if name not in environ]
    if not missing:
        return _read_torchrun(environ)
    if any(name in environ for name in _MPIRUN.values()):
        return _read_mpirun(environ)
    found = [name for name in _TORCHRUN.values() if name in environ]
    if found:
        raise ConfigError(
            f"the environment sets {', '.join(found)} but not {', '.join(missing)}: start all "
            "processes with torchrun, which sets them all, or unset the former to run a single "
            "process"
        )
    return {}


def _read_torchrun(environ: Mapping[str, str]) -> dict[str, Any]:
    names = _TORCHRUN | {"master_port": "MASTER_PORT"}
    names |= {"attempt": "TORCHELASTIC_RESTART_COUNT"}
    problems: list[str] = []
    values = _read_counts(environ, names, problems)
    _check(values, names, problems)
    return values | {"master_addr": environ["MASTER_ADDR"], "source": "torchrun"}


def _read_mpirun(environ: Mapping[str, str]) -> dict[str, Any]:
    names = _MPIRUN | {"master_port": "MASTER_PORT"}
    problems = [
        f"{name} is not set, although mpirun sets it"
        for name in _MPIRUN.values()
        if name not in environ
    ]
    values = {"master_port": _DEFAULT_MASTER_PORT} | _read_counts(environ, names, problems)
    for field, name in _TORCHRUN.items():
        if name in environ and environ[name] != environ.get(_MPIRUN[field], environ[name]):
            problems.append(
                f"{name}={environ[name]} contradicts {_MPIRUN[field]}={environ[_MPIRUN[field]]}; "
                f"unset {name}"
            )
    size, local_size = values.get("world_size"), values.get("local_size")
    if "MASTER_ADDR" not in environ and size and local_size and local_size < size:
        problems.append(
            f"{size} processes run on several nodes ({local_size} on this one), but MASTER_ADDR is "
            "not set; set it to the host of rank 0, for instance with mpirun -x MASTER_ADDR=<host>"
        )
    _check(values, names, problems)
    master_addr = environ.get("MASTER_ADDR", "127.0.0.1")
    return values | {"master_addr": master_addr, "source": "mpirun"}


def _read_counts(
    environ: Mapping[str, str], names: Mapping[str, str], problems: list[str]
) -> dict[str, int]:
    """Integers by meaning; variables that hold something else go to `problems`."""
    values: dict[str, int] = {}
    for field, name in names.items():
        text = environ.get(name)
        if text is None:
            continue
        if text.isascii() and text.isdecimal():
            values[field] = int(text)
        else:
            problems.append(f"{name}={text} must be an integer >= 0")
    return values


def _check(values: Mapping[str, int | None], names: Mapping[str, str], problems: list[str]) -> None:
    """Adds contradictions among the values to `problems`, and raises if there are any."""

    def compare(low: str, high: str, is_equal_allowed: bool) -> None:
        small, large = values.get(low), values.get(high)
        if small is None or large is None:
            return
        if small > large or (small == large and not is_equal_allowed):
            relation = "at most" if is_equal_allowed else "below"
            problems.append(f"{names[low]}={small} must be {relation} {names[high]}={large}")

    compare("rank", "world_size", is_equal_allowed=False)
    compare("local_rank", "local_size", is_equal_allowed=False)
    compare("local_size", "world_size", is_equal_allowed=True)
    port = values.get("master_port")
    if port is not None and not 1 <= port <= 65535:
        problems.append(f"MASTER_PORT={port} must be a port from 1 to 65535")
    if problems:
        raise ConfigError(
            "the launcher's environment variables cannot be used:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def _read_json(
    environ: Mapping[str, str], name: str, may_be_path: bool
) -> Mapping[str, Any] | None:
    text = environ.get(name)
    if text is None:
        return None
    where = name
    if may_be_path and not text.startswith(("{", "[", '"')):
        where = f"{name} (file {text})"
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{where} cannot be read: {error}. Set it to JSON text such as "
                '{"microbatches": 4}, or to the path of a JSON file'
            ) from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 20, 0) : error.pos + 20]
        raise ConfigError(
            f"{where} is not valid JSON: {error.msg} at line {error.lineno}, column "
            f"{error.colno}, near {near!r}"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where} must hold a JSON object of configuration keys such as "
            f'{{"microbatches": 4}}, but holds {value!r}'
        )
    return value


def _asks_for_cuda(environ: Mapping[str, str]) -> bool:
    if "PJRT_DEVICE" in environ:
        return environ["PJRT_DEVICE"] in ("CUDA", "GPU")
    return _has_any("jax_cuda12_plugin", "jax_cuda13_plugin")


def _asks_for_torch_xla(environ: Mapping[str, str]) -> bool:
    if "PJRT_DEVICE" in environ:
        return not _asks_for_cuda(environ)
    return _has_any("libtpu", "torch_neuronx")


def _has_any(*packages: str) -> bool:
    return any(importlib.util.find_spec(package) is not None for package in packages)


def _read_device(environ: Mapping[str, str]) -> str | None:
    """`MPXLA_EAGER=1` stands for the backend that runs operator by operator."""
    eager, device = environ.get("MPXLA_EAGER", "0"), environ.get("MPXLA_DEVICE")
    if eager not in ("0", "1"):
        raise ConfigError(f"MPXLA_EAGER={eager} must be 1 or 0")
    if eager == "0" or device == "eager":
        return device
    if device is not None:
        raise ConfigError(
            f"MPXLA_EAGER=1 runs the step on the host, and MPXLA_DEVICE={device} on another "
            "device; unset one of them"
        )
    return "eager"


def _read_log_level(environ: Mapping[str, str]) -> str:
    level = environ.get("MPXLA_LOG_LEVEL", "INFO").upper()
    names = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    if level not in names:
        raise ConfigError(f"MPXLA_LOG_LEVEL={level} must be one of {', '.join(names)}")
    return level


def _read_secret(environ: Mapping[str, str]) -> str | None:
    secret = environ.get("MPXLA_SECRET")
    if secret is not None and len(secret) < _SHORTEST_SECRET:
        raise ConfigError(
            f"MPXLA_SECRET has {len(secret)} characters, which can be guessed; it must have "
            f"{_SHORTEST_SECRET} or more, made by chance: "
            "export MPXLA_SECRET=$(python3 -c 'import secrets; print(secrets.token_hex(32))')"
        )
    return secret
