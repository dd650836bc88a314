"""Runs the `xla` transport's programs across CPU processes, by jaxlib's CPU client.

torch_xla's own CPU client knows no other process; that of `CpuWorld` does, and takes the StableHLO
that torch_xla makes of a program: so the very programs that an accelerator would get are executed
by XLA's own collectives.

jax is optional: the extra `cpu-collectives`. This file must not know what programs are for.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mpxla.comm.xla_programs import GraphProgram, Program
from mpxla.device.cpu_world import CpuWorld
from mpxla.device.torch_xla.collectives.programs import trace

__all__ = ["CpuRunner"]

# Torch dtypes that numpy lacks, and the integer of their size.
_FOREIGN = {
    torch.bfloat16: ("bfloat16", torch.int16, np.int16),
    torch.float8_e4m3fn: ("float8_e4m3fn", torch.int8, np.int8),
    torch.float8_e5m2: ("float8_e5m2", torch.int8, np.int8),
}


class _Lowered(NamedTuple):
    """A program that has not been compiled."""

    program: Program | GraphProgram
    artifact: bytes
    sources: list[int | np.ndarray]


class _Loaded(NamedTuple):
    """A program that can be executed."""

    executable: Any
    lowered: _Lowered


class CpuRunner(CpuWorld):
    """Compiles and executes programs in a world of CPU processes."""

    def lower(self, program: Program | GraphProgram) -> _Lowered:
        """Makes the program's StableHLO; as bytes, since its text loses constants of booleans."""
        traced = trace(program)
        sources = [s if isinstance(s, int) else s.cpu().numpy() for s in traced.sources()]
        return _Lowered(program, traced.stablehlo_bytes(), sources)

    def fetch(self, operand: torch.Tensor) -> torch.Tensor:
        """Copies an operand to the host once it is computed."""
        return operand.detach().cpu().contiguous()

    def load(self, lowered: _Lowered) -> _Loaded:
        """Compiles a program for the members of its mesh, one replica each."""
        members = lowered.program.mesh.members
        options = self.jax.client.CompileOptions()
        options.num_replicas, options.num_partitions = len(members), 1
        options.device_assignment = self.jax.client.DeviceAssignment.create(
            np.array([[self.devices[member].id] for member in members])
        )
        with self.jax.make_ir_context():
            module = self.jax.xla.mlir.deserialize_portable_artifact(lowered.artifact)
            executable = self.client.compile_and_load(
                self.jax.ir.Module.parse(module) if isinstance(module, (str, bytes)) else module,
                self.jax.client.DeviceList((self.device,)),
                options,
            )
        return _Loaded(executable, lowered)

    def execute(
        self, loaded: _Loaded, operands: Sequence[torch.Tensor | None], to_host: bool
    ) -> list[torch.Tensor]:
        """Runs a program and waits for it; None in place of an operand stands for zeros.

        Results are on the host in any case.
        """
        sources, kinds = loaded.lowered.sources, loaded.lowered.program.operands
        arrays = [
            _to_numpy(torch.zeros(k.shape, dtype=k.dtype) if t is None else t.view(k.shape))
            for t, k in zip(operands, kinds, strict=True)
        ]
        buffers = [self._upload(arrays[s] if isinstance(s, int) else s) for s in sources]
        results = loaded.executable.execute_sharded(buffers)
        return [
            _to_torch(np.asarray(shards[0]))
            for shards in results.disassemble_into_single_device_arrays()
        ]

    def _upload(self, array: np.ndarray) -> Any:
        jax = self.jax
        return jax.xla.batched_device_put(
            jax.ShapedArray(array.shape, array.dtype),
            jax.SingleDeviceSharding(self.device),
            [array],
            [self.device],
            enable_x64=True,
        )


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A host tensor as a numpy array; ml_dtypes, a dependency of jax, has what numpy lacks."""
    if tensor.dtype not in _FOREIGN:
        return tensor.numpy()
    name, integer, _ = _FOREIGN[tensor.dtype]
    return tensor.view(integer).numpy().view(getattr(importlib.import_module("ml_dtypes"), name))


def _to_torch(array: np.ndarray) -> torch.Tensor:
    """A copy, because the array belongs to the client."""
    for dtype, (name, _, integer) in _FOREIGN.items():
        if array.dtype.name == name:
            return torch.from_numpy(array.view(integer).copy()).view(dtype)
    return torch.from_numpy(array.copy())
