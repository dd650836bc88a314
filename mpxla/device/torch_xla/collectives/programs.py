"""How torch_xla traces the programs of the `xla` transport (`mpxla/comm/xla_programs.py`).

A transfer moves all tensors of one message, those of one dtype as one flat operand. There is no
collective-permute, because Neuron has only circular ones, and no broadcast, which it does not have.
Bools travel as uint8. (neuronx-distributed, pipeline/comm.py.)

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
                outputs = _BUILDERS[program.op](program, inputs)
        finally:
            _xla._set_all_reduce_token(str(device), None)
    return Traced(inputs, outputs)


def _all_reduce(program: Program, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    (value,) = inputs
    return [_unwired(_reduce_in_graph(program.mesh, _wired(value), "sum"), value.dtype)]


def _all_gather(program: Program, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    (value,) = inputs
    return [_unwired(_gathered(program, _wired(value)), value.dtype)]


def _reduce_scatter(program: Program, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [_scatter_in_graph(program.mesh, inputs[0], "sum", len(program.mesh.groups[0]))]


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


def _transfer(program: Program, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    by_dtype: dict[torch.dtype, list[int]] = {}
    wired = [_wired(value) for value in inputs]
    for index, value in enumerate(wired):
        by_dtype.setdefault(value.dtype, []).append(index)
    outputs: list[torch.Tensor] = list(inputs)
    for indices in by_dtype.values():
        flat = torch.cat([wired[index].reshape(-1) for index in indices])
        sent = _gathered(program, flat)[program.slot]
        end = 0
        for index in indices:
            value = inputs[index]
            start, end = end, end + value.numel()
            outputs[index] = _unwired(sent[start:end].reshape(value.shape), value.dtype)
    return outputs


def _gathered(program: Program, value: torch.Tensor) -> torch.Tensor:
    return _gather_in_graph(program.mesh, value.unsqueeze(0), len(program.mesh.groups[0]))


def _wired(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.uint8) if value.dtype is torch.bool else value


def _unwired(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(torch.bool) if dtype is torch.bool else value


_BUILDERS: dict[str, Callable[[Program, list[torch.Tensor]], list[torch.Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "transfer": _transfer,
}
