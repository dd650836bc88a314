"""The device's rates, by which steps are estimated where nothing was measured of themselves.

A few small programs measure them once for a kind of device, and a file keeps them. They are rounded
to two values per factor of two, so that the same device gives the same plan again. Rank 0 tells its
own to all, since ranks that estimate differently would cut the same step differently. Links between
ranks are not measured. This module must not know steps.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mpxla import __version__
from mpxla.config import Config
from mpxla.device.backend import Backend
from mpxla.env import LaunchEnv, cores_per_process
from mpxla.graph.cost import MachineModel
from mpxla.log import get_logger
from mpxla.runtime.automatic import free_keys
from mpxla.session import Session
from mpxla.stage.spec import TensorSpec
from mpxla.stage.timing import fastest

__all__ = ["device_rates", "measure_rates", "rates_of_job"]

_MEASURED = ("flops_per_s", "narrow_flops_per_s", "memory_bytes_per_s", "task_s")
_ON_HOST, _ON_ACCELERATOR = (256, 1024), (4096, 6144)
"""Rows of the square matrices that are multiplied, and of those that are added: so many that
starting a program counts little."""
_NUM_TASKS, _SMALL = 16, 32
"""Products of small matrices one after the other, which no compiler makes one task of."""
_LEAST_SHARE = 0.1
"""Of what a program took, that is left if starting it seems to have taken all of it."""


def rates_of_job(session: Session) -> MachineModel:
    """The rates that all ranks estimate by; every rank calls it.

    Args:
        session: its configuration says whether they are needed at all.
    """
    if not _are_needed(session.config):
        return MachineModel()
    if session.rank > 0:
        return MachineModel(**session.objects.recv_from(0))
    backend, machine = session.backend, MachineModel()
    if session.config.device_rates == "measured" or not backend.is_host:
        machine = device_rates(backend, session.env)
    session.objects.broadcast(asdict(machine), session.topology.world_group())
    return machine


def _are_needed(config: Config) -> bool:
    """Whether a cut or a schedule is chosen, and by rates that are not constant."""
    if config.pipeline_parallel_degree == 1 or config.device_rates == "constant":
        return False
    is_cut = config.auto_partition and not config.load_partition
    return is_cut or bool(free_keys(config))


def device_rates(backend: Backend, env: LaunchEnv) -> MachineModel:
    """The rates from the file for such devices; measured if there is none that can be read.

    Args:
        backend: of the device.
        env: the user's folder for what can be made again, and the processes on this host.

    Returns:
        The constants if measuring fails.
    """
    key = _key(backend, env)
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16] + ".json"
    path = Path(env.cache_dir, "mpxla", "rates", name).expanduser()
    found = _read(path, key)
    if found is not None:
        return found
    try:
        found = measure_rates(backend)
    except Exception as error:  # a user's job goes on with what is documented
        get_logger().warning("the device's rates cannot be measured, constants count: %r", error)
        return MachineModel()
    values = {name: getattr(found, name) for name in _MEASURED}
    get_logger().info(
        "measured on %s: %s",
        backend.kind,
        ", ".join(f"{name} = {value:.2g}" for name, value in values.items()),
    )
    _write(path, {"key": key, "rates": values})
    return found


def measure_rates(backend: Backend) -> MachineModel:
    """Products, memory traffic and the fixed cost of a task, by five small programs."""
    rows, rows_of_sum = _ON_HOST if backend.is_host else _ON_ACCELERATOR
    small = [TensorSpec((_SMALL, _SMALL), torch.float32)] * 2

    def products(a: torch.Tensor, b: torch.Tensor, number: int = 1) -> list[torch.Tensor]:
        for _ in range(number):
            a = a @ b
        return [a]

    def chain(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return products(a, b, 1 + _NUM_TASKS)

    def total(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a + b]

    start_s = fastest("a product", products, small, backend)

    def seconds(name: str, function: Any, spec: TensorSpec) -> float:
        """Of a program, less what it takes to start one."""
        taken_s = fastest(name, function, [spec, spec], backend)
        return max(taken_s - start_s, _LEAST_SHARE * taken_s)

    def flops(dtype: torch.dtype) -> float:
        matrix = TensorSpec((rows, rows), dtype)
        return 2 * rows**3 / seconds(f"a product in {dtype}", products, matrix)

    added = TensorSpec((rows_of_sum, rows_of_sum), torch.float32)
    return MachineModel(
        flops_per_s=_rounded(flops(torch.float32)),
        narrow_flops_per_s=_rounded(flops(torch.bfloat16)),
        memory_bytes_per_s=_rounded(3 * added.num_bytes / seconds("a sum", total, added)),
        task_s=_rounded(seconds("a chain of products", chain, small[0]) / _NUM_TASKS),
    )


def _rounded(value: float) -> float:
    """The nearest of two values per factor of two."""
    return 2.0 ** (round(2 * math.log2(value)) / 2)


def _key(backend: Backend, env: LaunchEnv) -> dict[str, Any]:
    """What decides how fast programs are."""
    return {
        "device": backend.kind,
        "backend": backend.name,
        "processor": _processor(),
        "threads": cores_per_process(env.local_size),
        "versions": [__version__, torch.__version__],
    }


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: Path, key: Mapping[str, Any]) -> MachineModel | None:
    """What a file holds; None if it is not there, or broken."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        values = {name: float(held["rates"][name]) for name in _MEASURED}
        is_right = held["key"] == key and all(0 < v < math.inf for v in values.values())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return replace(MachineModel(), **values) if is_right else None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Keeps them, whole or not at all: jobs of the same user write at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(part, path)
    except OSError as error:
        get_logger().debug("the device's rates are not kept: %s", error)
