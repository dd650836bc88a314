"""Programs of the `xla` transport by jax: one process is one place of a mesh, which XLA joins.

On the CPU they run on the devices of `CpuWorld`, beside jax's own device of the process, which
knows no other. A value of one rank is one part, [1, ...], of an array [ranks, ...].
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from mpxla.comm.mesh import Mesh
from mpxla.comm.xla_programs import GraphProgram, Program
from mpxla.device.cpu_world import CpuWorld
from mpxla.device.messages import results_of
from mpxla.device.pjrt.arrays import host_view, import_tensor, shared_tensors
from mpxla.device.pjrt.compiling import compile_lowered
from mpxla.device.pjrt.dtypes import jax_dtype
from mpxla.device.pjrt.graphs import as_function

__all__ = ["COLLECTIVES", "WorldRunner"]

_AXES = ("group", "rank")
_RANK = "rank"
_Program = Program | GraphProgram
_CPU = torch.device("cpu")


def _reduce(mesh: Mesh, value: jax.Array, operation: str) -> jax.Array:
    functions = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}
    return functions[operation](value, _RANK)


def _gather(mesh: Mesh, value: jax.Array, size: int) -> jax.Array:
    return jax.lax.all_gather(value, _RANK, axis=0, tiled=True)


def _scatter(mesh: Mesh, value: jax.Array, operation: str, size: int) -> jax.Array:
    assert operation == "sum", f"reduce_scatter_tensor by {operation!r} in a program"
    return jax.lax.psum_scatter(value, _RANK, scatter_dimension=0, tiled=True)


_c10d = torch.ops._c10d_functional
COLLECTIVES: Mapping[Any, Callable[..., jax.Array]] = {
    _c10d.all_reduce.default: _reduce,
    _c10d.all_gather_into_tensor.default: _gather,
    _c10d.reduce_scatter_tensor.default: _scatter,
    _c10d.wait_tensor.default: lambda mesh, value: value,
}
"""Functional collective -> what is in a program for it: (mesh, value, options) -> value."""


def _computed(program: _Program, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """What a rank gives, of what it takes."""
    if isinstance(program, GraphProgram):
        return as_function(program.name, program.module)(None, inputs)
    return results_of(
        program,
        inputs,
        COLLECTIVES,
        lambda value, dtype: value.astype(jax_dtype(dtype)),
        jnp.concatenate,
    )


def _traced(program: _Program, mesh: Any) -> Any:
    """A program in jax's hands, for a mesh [groups, ranks of a group]; and how values lie there."""
    parts = PartitionSpec(_AXES)
    sharding = NamedSharding(mesh, parts)

    def of_rank(*blocks: jax.Array) -> list[jax.Array]:
        return [result[None] for result in _computed(program, [block[0] for block in blocks])]

    function = jax.shard_map(of_rank, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)
    count = len(program.mesh.members)
    specs = [
        jax.ShapeDtypeStruct((count, *o.shape), jax_dtype(o.dtype), sharding=sharding)
        for o in program.operands
    ]
    return jax.jit(function, keep_unused=True).trace(*specs), sharding


class _Lowered(NamedTuple):
    """A program that has not been compiled, or has been, and how its arguments are divided."""

    program: _Program
    call: Any
    sharding: NamedSharding


class WorldRunner(CpuWorld):
    """Compiles and executes programs in a world of CPU processes; see `xla_queue.Runner`."""

    def lower(self, program: _Program) -> _Lowered:
        """Traces a program."""
        places = [[self.devices[rank] for rank in group] for group in program.mesh.groups]
        traced, sharding = _traced(program, jax.sharding.Mesh(np.array(places), _AXES))
        return _Lowered(program, traced.lower(), sharding)

    def fetch(self, operand: Any) -> torch.Tensor:
        """Waits for an operand; it shares memory with the tensor that it gives."""
        is_array = isinstance(operand, jax.Array)
        return (host_view(operand) if is_array else operand.detach().cpu()).contiguous()

    def load(self, lowered: _Lowered) -> _Lowered:
        """Compiles a program; its members may do so at different times."""
        return lowered._replace(call=compile_lowered(lowered.call, "cpu"))

    def execute(
        self, loaded: _Lowered, operands: Sequence[torch.Tensor | None], to_host: bool
    ) -> list[torch.Tensor]:
        """Runs a program and waits for it; results are on the host."""
        count, kinds = len(loaded.program.mesh.members), loaded.program.operands
        arrays = []
        for tensor, kind in zip(operands, kinds, strict=True):
            value = torch.zeros(kind.shape, dtype=kind.dtype) if tensor is None else tensor
            part = import_tensor(value.reshape(1, *kind.shape), self.device)
            shape = (count, *kind.shape)
            arrays.append(jax.make_array_from_single_device_arrays(shape, loaded.sharding, [part]))
        results = [result.addressable_data(0) for result in loaded.call(*arrays)]
        # Copies: memory of the world's client must not outlive it.
        return [found[0].clone() for found in shared_tensors(results, _CPU, "cpu")]
