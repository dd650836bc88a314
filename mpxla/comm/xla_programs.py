"""The programs of the `xla` transport: one small collective each.

A device that waits for all members while it loads a program with a collective (Neuron) must not
have collectives inside large programs that load at different times. So every communication is a
program of its own, which all members load at the same point:

    all_reduce      [...]       -> [...]          sum; also broadcasts (all but the source give
                                                  zeros) and barriers (one element)
    all_gather      [...]       -> [k, ...]
    reduce_scatter  [k, ...]    -> [...]
    transfer        tensors     -> tensors        an all-gather over pairs of ranks; the receiver
                                                  gives zeros, and both keep the sender's half

    graph           tensors     -> tensors        a stage's program with collectives inside, where
                                                  the device allows it

Operands of collectives have at least one dim. The device's backend makes the programs and executes
them; this file only names them.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from mpxla.comm.codec import register
from mpxla.comm.mesh import Mesh
from mpxla.comm.packing import Spec, describe

__all__ = ["GraphProgram", "Operand", "Program", "operand_of"]

register(Mesh)


@register
class Operand(NamedTuple):
    """Shape, of at least one dim, and dtype of one operand."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@register
class Program(NamedTuple):
    """What makes two programs the same."""

    op: str
    """`all_reduce`, `all_gather`, `reduce_scatter` or `transfer`."""
    mesh: Mesh
    """The groups that it joins."""
    operands: tuple[Operand, ...]
    """One, except for a transfer."""
    slot: int = 0
    """For a transfer: which of its two ranks sends."""

    def __str__(self) -> str:
        direction = f" from end {self.slot}" if self.op == "transfer" else ""
        return f"{self.op}{direction} of {describe(self.operands)} over {self.mesh}"


@dataclass(frozen=True, eq=False)
class GraphProgram:
    """A program of a stage that contains collectives; each is another one."""

    op: ClassVar[str] = "graph"
    name: str
    """For messages, for instance "stage 1 forward"."""
    mesh: Mesh
    """The group that its collectives join."""
    operands: tuple[Operand, ...]
    """Arguments, of any number of dims."""
    module: fx.GraphModule
    """Takes the arguments on the device; returns a list of tensors there."""
    results: tuple[Operand, ...]
    """Their shapes and dtypes."""
    made: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """What the queue has made of it, which goes when the plan is dropped that the program is of."""

    def __str__(self) -> str:
        return f"{self.name} over {self.mesh}"


def operand_of(spec: Spec) -> Operand:
    """An operand as programs take it: scalars become tensors of one element."""
    return Operand(tuple(spec.shape) or (1,), spec.dtype)
