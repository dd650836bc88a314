"""What a stage takes and gives: parameters, values that cross its borders, results.

Plain data, equal on all ranks, so that both ends of a transfer agree without talking.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

__all__ = ["InputPort", "OutputPort", "StageSpec", "TensorSpec", "Transfer", "key_of_call"]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def without_storage(self) -> torch.Tensor:
        """A tensor like this on the device `meta`."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """The spec of an existing (or fake) tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)


def key_of_call(node: fx.Node) -> Any:
    """Equal for calls of one operator on tensors of equal specs, with equal other arguments."""

    def described(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return repr(value)
        return pytree.tree_map_only(torch.Tensor, TensorSpec.of, value.meta.get("val"))

    return node.target, repr(pytree.tree_map(described, (node.args, node.kwargs)))


@dataclass(frozen=True)
class InputPort:
    """A value that a stage reads and does not compute.

    Attributes:
        name: name of the value, unique in the step graph.
        spec: its shape and dtype, for one microbatch.
        source: stage that computes it, or None for a step input (which lives with stage 0).
        leaf: for a step input, its index among the tensor leaves of the call.
        has_grad: whether the stage's backward gives a gradient for it.
    """

    name: str
    spec: TensorSpec
    source: int | None
    leaf: int = -1
    has_grad: bool = False


@dataclass(frozen=True)
class OutputPort:
    """A value that a stage computes and later stages read.

    Attributes:
        name: name of the value, unique in the step graph.
        spec: its shape and dtype, for one microbatch.
        consumers: stages that read it, ascending.
        grad_sources: those among them that send a gradient back.
    """

    name: str
    spec: TensorSpec
    consumers: tuple[int, ...]
    grad_sources: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """The values that one stage hands to another in one message, in order."""

    source: int
    target: int
    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Payload bytes for one microbatch."""
        return sum(spec.num_bytes for spec in self.specs)


@dataclass(frozen=True)
class StageSpec:
    """One stage of a step.

    The graph's placeholders are, in order: parameters, buffers, constants, inputs. Its outputs are,
    in order: outputs, results, new buffers, objectives.

    Attributes:
        index: position in the pipeline.
        graph: the stage's nodes, functional, on host tensors.
        parameters: names of the parameters it reads.
        trained: those that get a gradient from this stage.
        buffers: names of the buffers it reads.
        constants: names of the constants it reads.
        inputs: values it reads.
        outputs: values it gives to later stages.
        results: indices of the step's results that it computes.
        result_specs: their shapes and dtypes.
        new_buffers: names of the buffers and parameters that it changes.
        num_objectives: how many scalars it differentiates.
    """

    index: int
    graph: fx.Graph
    parameters: tuple[str, ...]
    trained: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    inputs: tuple[InputPort, ...]
    outputs: tuple[OutputPort, ...]
    results: tuple[int, ...]
    result_specs: tuple[TensorSpec, ...]
    new_buffers: tuple[str, ...]
    num_objectives: int

    @property
    def num_plain(self) -> int:
        """How many outputs come before the objectives."""
        return len(self.outputs) + len(self.results) + len(self.new_buffers)

    @property
    def first_input(self) -> int:
        """Index of the first of `inputs` among the arguments of the forward."""
        return len(self.parameters) + len(self.buffers) + len(self.constants)

    def is_of_microbatch(self, argument: int) -> bool:
        """Whether an argument of the forward exists once per microbatch, by its index."""
        held = (*self.parameters, *self.buffers)
        is_changed = argument < len(held) and held[argument] in self.new_buffers
        return is_changed or argument >= self.first_input

    @property
    def has_backward(self) -> bool:
        """Whether anything in this stage receives a gradient."""
        return bool(self.trained) or any(port.has_grad for port in self.inputs)
