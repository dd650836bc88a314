"""Runs the `xla` transport's programs on a device whose processes form one PJRT world (NEURON).

A program is traced once and then started by its handle, as the stages' programs are. The device
runs what it is given in order, so the order in which the transport starts programs is theirs.

Not run on such a device so far: in a world of one, torch_xla's CPU client runs this same code.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.runtime as xr

from mpxla.comm.transport import Group
from mpxla.comm.xla_programs import GraphProgram, Program
from mpxla.device.torch_xla.collectives.programs import trace
from mpxla.device.torch_xla.tensors import to_device
from mpxla.errors import TopologyError

__all__ = ["DeviceRunner", "is_device_world"]

_xla: Any = torch_xla._XLAC  # pyright: ignore[reportPrivateUsage]


class _Compiled(NamedTuple):
    """A program by its handle."""

    graph_hash: Any
    sources: list[int | torch.Tensor]
    zeros: list[torch.Tensor]


def is_device_world(world_size: int) -> bool:
    """Whether the devices of all processes reach each other, which CPU processes do not."""
    return xr.world_size() == world_size


class DeviceRunner:
    """Compiles and executes programs in the world of this process's device."""

    loads_alone = False

    def __init__(self, rank: int, world_size: int) -> None:
        """Checks that ranks are numbered as devices are.

        Raises:
            TopologyError: They are not, so that replica groups would name others.
        """
        if (xr.global_ordinal(), xr.world_size()) != (rank, world_size):
            raise TopologyError(
                f"rank {rank} of {world_size} has device {xr.global_ordinal()} of "
                f"{xr.world_size()}: start one process per device, with torchrun, so that ranks "
                f"and devices are numbered alike."
            )
        self._world: Group = tuple(range(world_size))

    def meet(self, ranks: Group, what: str, purpose: str, text: str) -> None:
        """Nothing: the program itself is where its members meet."""

    def lower(self, program: Program | GraphProgram) -> _Compiled:
        """Traces and compiles a program.

        Raises:
            TopologyError: Its mesh leaves a rank out.
        """
        if program.mesh.members != self._world:
            left = sorted(set(self._world) - set(program.mesh.members))
            raise TopologyError(
                f"{program} leaves out rank {left[0]}: on this device all ranks take part in every "
                f"program. Start a number of processes that groups of "
                f"{len(program.mesh.groups[0])} divide."
            )
        traced = trace(program)
        graph_hash = _xla._get_graph_hash(traced.outputs)
        _xla._xla_warm_up_cache(traced.outputs, [])
        return _Compiled(graph_hash, traced.sources(), traced.inputs)

    def fetch(self, operand: torch.Tensor) -> torch.Tensor:
        """The operand as it is, perhaps still computing."""
        return operand.detach()

    def load(self, lowered: _Compiled) -> _Compiled:
        """Runs a program once on zeros, which is when a device loads it."""
        self.execute(lowered, [None] * len(lowered.zeros), to_host=True)
        return lowered

    def execute(
        self, loaded: _Compiled, operands: Sequence[torch.Tensor | None], to_host: bool
    ) -> list[torch.Tensor]:
        """Starts a program; operands may be on the host or the device, and None stands for zeros.

        With `to_host`, it waits for the results and reads them.
        """
        given = [self._place(t, z) for t, z in zip(operands, loaded.zeros, strict=True)]
        _xla._xla_sync_multi(given, [], False, True)  # what is lazy of them
        buffers = [given[s] if isinstance(s, int) else s for s in loaded.sources]
        results = _xla._run_cached_graph(loaded.graph_hash, buffers)
        return [result.cpu() for result in results] if to_host else list(results)

    def close(self) -> None:
        """Nothing to release."""

    def _place(self, operand: torch.Tensor | None, zeros: torch.Tensor) -> torch.Tensor:
        if operand is None:
            return zeros
        (value,) = to_device([operand], torch_xla.device())
        return value.reshape(zeros.shape)
