"""Functions of tensors, compiled by a backend."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpxla.stage.program import trace_program
from mpxla.stage.spec import TensorSpec

__all__ = ["compiled"]


def compiled(
    backend: Any,
    name: str,
    function: Callable[..., Sequence[torch.Tensor]],
    specs: Sequence[TensorSpec],
    **options: Any,
) -> Any:
    """A program that takes one buffer per spec."""
    graph = trace_program(name, function, specs, backend.lowering)
    return backend.compile(name, graph, specs, **options)
