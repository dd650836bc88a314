"""How long the operators of a step take on the device: `trace_execution_times`.

Every different operator (with its shapes, dtypes and plain arguments) runs alone, on zeros, and
counts with its fastest run, less what an empty program takes. So measured times contain no fusion
and no waiting; they replace the estimates from operation counts and bytes, of which the partitioner
then only uses the ratio of backward to forward. This module must not know partitions.
"""

import time
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import OpOverload

from mpxla.device.backend import Backend
from mpxla.graph.stepgraph import StepGraph
from mpxla.stage.program import compile_function
from mpxla.stage.spec import TensorSpec, key_of_call

__all__ = ["fastest", "measure_operators"]

_NUM_RUNS = 3


def measure_operators(
    step: StepGraph, backend: Backend, only: Collection[str] | None = None
) -> dict[str, float]:
    """Times the operators of a step's forward, or those of some names only.

    Returns:
        Seconds by name of node. Views and what is not an operator are left out.
    """
    known: dict[Any, float] = {}
    found: dict[str, float] = {}
    scalar = TensorSpec((), torch.float32)
    empty_s = fastest("an empty program", lambda value: [value + value], [scalar], backend)
    for node in step.graph.nodes:
        if not _is_measured(node) or (only is not None and node.name not in only):
            continue
        key = key_of_call(node)
        if key not in known:
            function, inputs = _as_function(node, backend.lowering.device)
            taken_s = fastest(f"operator {node.name}", function, inputs, backend)
            known[key] = max(taken_s - empty_s, 0.0)
        found[node.name] = known[key]
    return found


def _is_measured(node: fx.Node) -> bool:
    target = node.target
    return node.op == "call_function" and isinstance(target, OpOverload) and not target.is_view


def _as_function(
    node: fx.Node, device: torch.device
) -> tuple[Callable[..., list[torch.Tensor]], list[TensorSpec]]:
    """The operator as a function of its tensors, and their specs."""
    inputs = node.all_input_nodes
    given = pytree.tree_map_only(torch.device, lambda _: device, (node.args, node.kwargs))

    def function(*values: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = fx.map_arg(given, dict(zip(inputs, values, strict=True)).__getitem__)
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        results = pytree.tree_leaves(cast(OpOverload, node.target)(*args, **kwargs))
        return [value for value in results if isinstance(value, torch.Tensor)]

    return function, [TensorSpec.of(node.meta["val"]) for node in inputs]


def fastest(
    name: str,
    function: Callable[..., list[torch.Tensor]],
    inputs: list[TensorSpec],
    backend: Backend,
) -> float:
    """Seconds of the fastest run of a function as a program, on zeros; the first does not count."""
    program = compile_function(backend, name, function, inputs)
    arguments = backend.zeros(inputs)
    seed = backend.put([torch.zeros((), dtype=torch.int64)])[0] if program.is_random else None
    times: list[float] = []
    for _ in range(1 + _NUM_RUNS):
        backend.wait()
        started = time.perf_counter()
        results = program(arguments, seed)  # kept: a backend waits only for what somebody holds
        backend.wait()
        times.append(time.perf_counter() - started)
        del results
    return min(times[1:])
