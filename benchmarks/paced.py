"""A device of a given speed: programs compute their numbers, and results are ready when it is time.

What a schedule gains is hidden where ranks share cores. Here every program takes as long as its
floating-point operations would on a device of a given rate, without using a core: it begins when
it is started and the device has ended the program before it, and its results can be looked at from
its end on. Everything else is the library's own: the programs, which compute on the processor
meanwhile, the engine, the order of actions, the messages.
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from mpxla.device.backend import Buffer, Executable
from mpxla.device.choice import BACKENDS, open_backend
from mpxla.env import read_environment
from mpxla.stage.pieces import annotate
from mpxla.stage.spec import TensorSpec

_paced: list["PacedBackend"] = []
"""The one of this process."""


def pace(flops_per_s: float) -> "PacedBackend":
    """Paces this process's device, whichever it is; to be called before `smp.init`."""
    _paced.append(PacedBackend(open_backend(read_environment()), flops_per_s))
    BACKENDS["paced"] = ("torch", __name__, "paced_device")
    os.environ["MPXLA_DEVICE"] = "paced"
    return _paced[0]


def paced_device() -> "PacedBackend":
    """What the library opens as the device "paced"."""
    return _paced[0]


class PacedBackend:
    """See `Backend`; what is not here is the inner backend's.

    Args:
        inner: runs the programs.
        flops_per_s: by which they take their time.

    Attributes:
        name: see `Backend`.
        seconds: what every program takes, by name.
    """

    def __init__(self, inner: Any, flops_per_s: float) -> None:
        self.inner = inner
        self.name = f"paced {inner.name}"  # what is kept on disk differs between them
        self.seconds: dict[str, float] = {}
        self._rate = flops_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._due: dict[int, tuple[float, Buffer]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def compile(
        self,
        name: str,
        graph: fx.GraphModule,
        inputs: Sequence[TensorSpec],
        *rest: Any,
        **more: Any,
    ) -> "PacedExecutable":
        """The inner backend's program, at this device's rate."""
        self.seconds[name] = flops_of(graph, inputs) / self._rate
        program = self.inner.compile(name, graph, inputs, *rest, **more)
        return PacedExecutable(self, program, self.seconds[name])

    def run(self, program: Executable, seconds: float, arguments: Any, seed: Any) -> list[Buffer]:
        """Starts a program, whose results are due after those of the programs before it."""
        began = time.perf_counter()
        results = program(arguments, seed)
        with self._lock:
            self._free_at = max(began, self._free_at) + seconds
            for buffer in [one for due, one in self._due.values() if due <= began]:
                del self._due[id(buffer)]
            # Who holds a buffer keeps others from getting its identity.
            self._due.update({id(buffer): (self._free_at, buffer) for buffer in results})
        return results

    def is_ready(self, buffer: Buffer) -> bool:
        """Whether a buffer is computed and due."""
        return self._rest([buffer]) <= 0 and self.inner.is_ready(buffer)

    def view(self, buffer: Buffer) -> torch.Tensor:
        """Waits; see `Backend.view`."""
        self._wait_for([buffer])
        return self.inner.view(buffer)

    def get(self, buffers: Sequence[Buffer]) -> list[torch.Tensor]:
        """Waits; see `Backend.get`."""
        self._wait_for(buffers)
        return self.inner.get(buffers)

    def publish(self, buffers: Sequence[Buffer], is_held: bool = False) -> list[torch.Tensor]:
        """Waits; see `Backend.publish`."""
        self._wait_for(buffers)
        return self.inner.publish(buffers, is_held)

    def assign(self, tensors: Sequence[torch.Tensor], buffers: Sequence[Buffer]) -> None:
        """Waits; see `Backend.assign`."""
        self._wait_for(buffers)
        self.inner.assign(tensors, buffers)

    def wait(self) -> None:
        """Waits for all programs."""
        time.sleep(max(self._free_at - time.perf_counter(), 0.0))
        self.inner.wait()

    def _wait_for(self, buffers: Sequence[Buffer]) -> None:
        time.sleep(max(self._rest(buffers), 0.0))

    def _rest(self, buffers: Sequence[Buffer]) -> float:
        """Seconds until the last of some buffers is due."""
        with self._lock:
            due = max((self._due.get(id(buffer), (0.0,))[0] for buffer in buffers), default=0.0)
        return due - time.perf_counter()


class PacedExecutable:
    """See `Executable`; a program of the inner backend that takes some seconds."""

    def __init__(self, backend: PacedBackend, program: Executable, seconds: float):
        self.name, self.is_random = program.name, program.is_random
        self._backend = backend
        self._program = program
        self._seconds = seconds

    def __call__(self, arguments: Sequence[Buffer], seed: Buffer | None = None) -> list[Buffer]:
        """Starts the program."""
        return self._backend.run(self._program, self._seconds, arguments, seed)


def flops_of(graph: fx.GraphModule, inputs: Sequence[TensorSpec]) -> int:
    """Floating-point operations of a program's products; nothing else counts."""
    annotate(graph, inputs)
    total = 0
    for node in graph.graph.nodes:
        formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if formula is not None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            total += formula(*args, **kwargs, out_val=node.meta["val"])
    return total
