"""Small functions of tensors as graphs for a backend: updates, packing, norms, sums, layouts."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mpxla.device.backend import Backend, Executable, Lowering
from mpxla.errors import LoweringError
from mpxla.stage.joint import trace_alone
from mpxla.stage.spec import TensorSpec

__all__ = ["compile_function", "trace_program"]

_one_at_a_time = threading.Lock()
"""torch's tracer exchanges functions of modules meanwhile: two threads would never end."""


def trace_program(
    name: str,
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[TensorSpec],
    lowering: Lowering,
) -> fx.GraphModule:
    """A function as one functional graph; its copies stay, which keep results apart.

    It takes one tensor per spec, and gives tensors that share no memory.

    Raises:
        LoweringError: it cannot be traced.
    """

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return list(function(*tensors))

    try:
        with _one_at_a_time:
            module = trace_alone(call, inputs, lowering)
    except (AssertionError, LoweringError):
        raise  # a function's own refusal, such as that of an optimizer
    except Exception as error:  # torch raises anything while it traces
        raise LoweringError(
            f"{name} cannot be traced: {type(error).__name__}: {error}. Shapes must not depend on "
            f"values."
        ) from error
    _drop_marks(module.graph)
    module.graph.eliminate_dead_code()
    lowering.expand(module)
    return module


def compile_function(
    backend: Backend,
    name: str,
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[TensorSpec],
    **options: Any,
) -> Executable:
    """A function as a program; see `trace_program`. Options are those of `Backend.compile`.

    Raises:
        LoweringError: it cannot be traced, or not be compiled.
    """
    graph = trace_program(name, function, inputs, backend.lowering)
    return backend.compile(name, graph, inputs, **options)


def _drop_marks(graph: fx.Graph) -> None:
    """Takes out what tells PyTorch's profiler where it is, as optimizers do from torch 2.15 on.

    Else the program would be cut there, to run these operators on the host.
    """
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)
