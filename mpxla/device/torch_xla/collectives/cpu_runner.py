"""Runs the `xla` transport's programs across CPU processes, by jaxlib's CPU client.

torch_xla's own CPU client knows no other process; that of `CpuWorld` does, and takes the StableHLO
that torch_xla makes of a program: so the very programs that an accelerator would get are executed
by XLA's own collectives.

jax is optional: the extra `cpu-collectives`. This file must not know what programs are for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mpxla.comm.xla_programs import GraphProgram, Program
from mpxla.device.cpu_world import CpuWorld
from mpxla.device.torch_xla.collectives.programs import trace

__all__ = ["CpuRunner"]


class _Lowered(NamedTuple):
    """A program that has not been compiled, or has been, and what it takes."""

    program: Program | GraphProgram
    artifact: Any
    """Its StableHLO as bytes, and in the place of that what can be executed."""
    sources: list[int | torch.Tensor]


class CpuRunner(CpuWorld):
    """Compiles and executes programs in a world of CPU processes."""

    def lower(self, program: Program | GraphProgram) -> _Lowered:
        """Makes the program's StableHLO; as bytes, since its text loses constants of booleans."""
        traced = trace(program)
        sources = [s if isinstance(s, int) else s.cpu() for s in traced.sources()]
        return _Lowered(program, traced.stablehlo_bytes(), sources)

    def fetch(self, operand: torch.Tensor) -> torch.Tensor:
        """Copies an operand to the host once it is computed."""
        return operand.detach().cpu().contiguous()

    def load(self, lowered: _Lowered) -> _Lowered:
        """Compiles a program for the members of its mesh, one replica each."""
        members = lowered.program.mesh.members
        options = self.jax.client.CompileOptions()
        options.num_replicas, options.num_partitions = len(members), 1
        options.device_assignment = self.jax.client.DeviceAssignment.create(
            np.array([[self.devices[member].id] for member in members])
        )
        with self.jax.make_ir_context():
            module = self.jax.xla.mlir.deserialize_portable_artifact(lowered.artifact)
            devices = self.jax.client.DeviceList((self.device,))
            executable = self.client.compile_and_load(module, devices, options)
        return lowered._replace(artifact=executable)

    def execute(
        self, loaded: _Lowered, operands: Sequence[torch.Tensor | None], to_host: bool
    ) -> list[torch.Tensor]:
        """Runs a program and waits for it; None in place of an operand stands for zeros.

        Results are on the host in any case.
        """
        from mpxla.device.pjrt.arrays import import_tensor, shared_tensors  # jax is optional

        program, executable, sources = loaded
        given = [
            torch.zeros(k.shape, dtype=k.dtype) if t is None else t.view(k.shape)
            for t, k in zip(operands, program.operands, strict=True)
        ]
        values = [given[s] if isinstance(s, int) else s for s in sources]
        found = executable.execute_sharded([import_tensor(v, self.device) for v in values])
        results = [shards[0] for shards in found.disassemble_into_single_device_arrays()]
        # Copies: memory of the world's client must not outlive it.
        return [value.clone() for value in shared_tensors(results, torch.device("cpu"), "cpu")]
