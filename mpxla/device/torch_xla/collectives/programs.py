"""How torch_xla traces the programs of the `xla` transport (`mpxla/comm/xla_programs.py`).

This file must not know what executes the programs.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from mpxla.comm.mesh import Mesh
from mpxla.comm.xla_programs import GraphProgram, Program
from mpxla.device.messages import results_of
from mpxla.device.torch_xla.tensors import to_device

__all__ = ["COLLECTIVES", "Traced", "trace"]

_xla: Any = torch_xla._XLAC  # pyright: ignore[reportPrivateUsage]
# Bound here, because a session may exchange these names (`world.py`).
_xla_all_reduce, _xla_all_gather = _xla._xla_all_reduce, _xla._xla_all_gather
_xla_reduce_scatter = _xla._xla_reduce_scatter
# The tracer has one chain of collectives per device: two threads must not build on it together.
_tracing = threading.Lock()


class Traced(NamedTuple):
    """A program in the tracer's hands: lower it before its outputs are dropped."""

    inputs: list[torch.Tensor]
    """Zeros on the device, one per operand."""
    outputs: list[torch.Tensor]
    """Lazy results."""

    def sources(self) -> list[int | torch.Tensor]:
        """For every parameter of the lowered program, the operand's index or a constant."""
        index_of = {_xla._xla_get_tensor_id(t): index for index, t in enumerate(self.inputs)}
        ids, values = _xla._get_tensors_xla_device_data_node(self.outputs)
        pairs = zip(ids, values, strict=True)
        return [index_of[i] if i in index_of else value for i, value in pairs]

    def stablehlo_bytes(self) -> bytes:
        """The program as a portable artifact of StableHLO."""
        outputs: Any = self.outputs  # torch_xla's type wants one tensor, and its code several
        return xm.get_stablehlo_bytecode(outputs)


def trace(program: Program | GraphProgram) -> Traced:
    """Traces a program, without running anything. Other pending work stays pending."""
    device = torch_xla.device()
    with _tracing, torch.no_grad():
        zeros = [torch.zeros(o.shape, dtype=o.dtype) for o in program.operands]
        inputs = to_device(zeros, device)
        _xla._set_all_reduce_token(str(device), None)
        try:
            if isinstance(program, GraphProgram):
                outputs = list(program.module(*inputs))
            else:
                outputs = results_of(program, inputs, COLLECTIVES, torch.Tensor.to, torch.cat)
        finally:
            _xla._set_all_reduce_token(str(device), None)
    return Traced(inputs, outputs)


def _reduce_in_graph(mesh: Mesh, value: torch.Tensor, operation: str) -> torch.Tensor:
    assert operation in ("sum", "max", "min"), f"all_reduce by {operation!r} in a program"
    # Not xm.all_reduce, which does nothing where torch_xla knows one process only.
    return _xla_all_reduce(operation, value, 1.0, mesh.replica_groups(), False)


def _gather_in_graph(mesh: Mesh, value: torch.Tensor, size: int) -> torch.Tensor:
    return _xla_all_gather(value, 0, size, mesh.replica_groups(), False, None, None)


def _scatter_in_graph(mesh: Mesh, value: torch.Tensor, operation: str, size: int) -> torch.Tensor:
    assert operation == "sum", f"reduce_scatter_tensor by {operation!r} in a program"
    device = str(value.device)
    token = _xla._get_all_reduce_token(device)
    own, token = _xla_reduce_scatter(
        xm.REDUCE_SUM, value, token, 1.0, 0, size, mesh.replica_groups(), False, None, None
    )
    _xla._set_all_reduce_token(device, token)
    return own


_c10d = torch.ops._c10d_functional
COLLECTIVES: Mapping[Any, Callable[..., torch.Tensor]] = {
    _c10d.all_reduce.default: _reduce_in_graph,
    _c10d.all_gather_into_tensor.default: _gather_in_graph,
    _c10d.reduce_scatter_tensor.default: _scatter_in_graph,
    _c10d.wait_tensor.default: lambda mesh, value: value,
}
"""Functional collective -> what is traced for it: (mesh, value, options) -> value."""
