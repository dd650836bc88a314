"""The device's rates, by which steps are estimated where nothing was measured of themselves.

A few small programs measure them once for a kind of device, and are kept for later starts; rounded
to two values per factor of two, so that the same device gives the same plan again. Rank 0 tells its
own to all, since ranks that estimate differently would cut the same step differently. The link
between the first two ranks of the first pipeline stands for all. What no plan depends on stays
constant: copies to the host, which only pictures show. This module must not know steps.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from mpxla.comm.host import HostTransport
from mpxla.config import Config
from mpxla.device.backend import Backend
from mpxla.env import xla_threads
from mpxla.graph.cost import MachineModel
from mpxla.kept import key_of
from mpxla.log import get_logger
from mpxla.runtime.link import PipelineLink
from mpxla.runtime.plans.automatic import free_keys
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
_MESSAGE = TensorSpec((2**22,), torch.float32)
_NUM_ROUNDS = 4
_CALLED = "measure the link"


def rates_of_job(session: Session) -> MachineModel:
    """The rates that all ranks estimate by; every rank calls it. Constants if none are needed."""
    if not _are_needed(session.config):
        return MachineModel()
    if session.rank > 0:
        found = session.objects.recv_from(0)
        if found == _CALLED:
            _round_s(session)
            found = session.objects.recv_from(0)
        return MachineModel(**found)
    backend, machine = session.backend, MachineModel()
    if session.config.device_rates == "measured" or not backend.is_host:
        machine = device_rates(session)
        if isinstance(session.transport, HostTransport):
            machine = replace(machine, link_bytes_per_s=_link_rate(session))
    session.objects.broadcast(asdict(machine), session.topology.world_group())
    return machine


def _are_needed(config: Config) -> bool:
    """Whether a cut or a schedule is chosen, and by rates that are not constant."""
    if config.pipeline_parallel_degree == 1 or config.device_rates == "constant":
        return False
    is_cut = config.auto_partition and not config.load_partition
    return is_cut or bool(free_keys(config))


def device_rates(session: Session) -> MachineModel:
    """The rates that an earlier start has kept; measured if there are none.

    Returns:
        The constants if measuring fails.
    """
    backend = session.backend

    def make() -> dict[str, float]:
        found = asdict(measure_rates(backend))
        return {name: found[name] for name in _MEASURED}

    try:
        processors = str(xla_threads())
        return MachineModel(**_recalled(session, make, "rates", processors))
    except Exception as error:  # a user's job goes on with what is documented
        get_logger().warning("the device's rates cannot be measured, constants count: %r", error)
        return MachineModel()


def _link_rate(session: Session) -> float:
    """Bytes per second of a message between two stages, copies on both sides included."""
    peer = session.topology.pp_group(0)[1]

    def make() -> dict[str, float]:
        session.objects.send(_CALLED, peer)
        return {"link_bytes_per_s": _rounded(2 * _MESSAGE.num_bytes / _round_s(session))}

    is_near = peer < session.env.local_size
    return _recalled(session, make, "link", str(is_near))["link_bytes_per_s"]


def _round_s(session: Session) -> float:
    """Seconds of a message there and back; rank 0 and its next stage's rank call it."""
    pipeline = session.topology.pp_group(0)
    link = PipelineLink(session.transport, pipeline, session.backend)
    me = pipeline.index(session.rank)
    sent, times = session.backend.zeros([_MESSAGE]), list[float]()
    for _ in range(1 + _NUM_ROUNDS):
        started = time.perf_counter()
        if me == 0:
            link.send_to(1, sent, "rates")
        sent = link.receive_from(1 - me, [_MESSAGE], "rates")()
        if me == 1:
            link.send_to(0, sent, "rates")
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _recalled(
    session: Session, make: Callable[[], dict[str, float]], *parts: str
) -> dict[str, float]:
    """Rates by their names, as an earlier start has measured them or as they are now."""

    def measure() -> dict[str, float]:
        values = make()
        texts = (f"{name} = {value:.2g}" for name, value in values.items())
        get_logger().info("measured: %s", ", ".join(texts))
        return values

    key = key_of(*parts, session.backend.name)
    return session.kept.recall(key, measure, lambda v: json.dumps(v).encode(), json.loads)


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
