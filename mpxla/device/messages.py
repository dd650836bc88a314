"""What the programs of the `xla` transport compute (`mpxla/comm/xla_programs.py`).

Written in what arrays of PyTorch and of jax have in common, so that both backends trace this one
text. A transfer moves all tensors of one message, those of one dtype as one flat operand. There is
no collective-permute, because Neuron has only circular ones, and no broadcast, which it does not
have. Bools travel as uint8. (neuronx-distributed, pipeline/comm.py.)

This file must not know who traces the programs, nor what executes them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mpxla.comm.xla_programs import Program

__all__ = ["results_of"]

_c10d = torch.ops._c10d_functional


def results_of(
    program: Program,
    inputs: Sequence[Any],
    collectives: Mapping[Any, Callable[..., Any]],
    cast: Callable[[Any, torch.dtype], Any],
    concatenate: Callable[[list[Any]], Any],
) -> list[Any]:
    """The results of one rank.

    Args:
        program: what is computed.
        inputs: an array for every operand.
        collectives: functional collective -> (mesh, array, options) -> array.
        cast: gives an array another dtype, named as PyTorch does.
        concatenate: puts flat arrays together.
    """
    mesh, dtypes = program.mesh, [operand.dtype for operand in program.operands]
    size = len(mesh.groups[0])
    wired = [torch.uint8 if dtype is torch.bool else dtype for dtype in dtypes]
    values = [cast(value, dtype) for value, dtype in zip(inputs, wired, strict=True)]

    def gathered(value: Any) -> Any:
        """[...] of every rank of a group as [ranks, ...]."""
        return collectives[_c10d.all_gather_into_tensor.default](mesh, value[None], size)

    if program.op == "all_reduce":
        values = [collectives[_c10d.all_reduce.default](mesh, values[0], "sum")]
    elif program.op == "all_gather":
        values = [gathered(values[0])]
    elif program.op == "reduce_scatter":
        scatter = collectives[_c10d.reduce_scatter_tensor.default]
        values = [scatter(mesh, values[0], "sum", size)]
    else:
        for dtype in dict.fromkeys(wired):
            places = [place for place, other in enumerate(wired) if other is dtype]
            flat = concatenate([values[place].reshape(-1) for place in places])
            sent, end = gathered(flat)[program.slot], 0  # both ends keep the sender's
            for place in places:
                shape = program.operands[place].shape
                start, end = end, end + math.prod(shape)
                values[place] = sent[start:end].reshape(shape)
    return [cast(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]
