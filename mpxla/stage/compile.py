"""Compilation of graphs to executables of the XLA device, called by handle.

A graph is traced to XLA once, on real tensors of the device; afterwards a call looks the executable
up by its hash and hands over the argument buffers: no operator is traced again. This is the only
file of the stages that knows torch_xla.

`Traced -> Lowered -> Compiled` here is: an fx graph module, `Executable.text()` (its HLO), and the
`Executable` itself.

XLA's CPU client runs programs that do not depend on each other at the same time, on the one core of
a rank: the value that another rank waits for would be ready only when all of them are. There every
program takes a *ticket*, a scalar that the program before it returns, so that programs run in the
order of their calls, as they do on an accelerator.
"""

import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from torch import fx

from mpxla.errors import LoweringError
from mpxla.graph.stepgraph import module_path
from mpxla.stage.device import is_host_device, to_device
from mpxla.stage.spec import TensorSpec

__all__ = ["Executable", "compile_graph", "num_compilations"]

_xla = torch_xla._XLAC
_TICKET = TensorSpec((), torch.int32)


class Executable:
    """A compiled program with fixed shapes.

    Calling it with tensors of the device returns tensors of the device; execution is asynchronous.

    Attributes:
        name: for messages, for instance "stage 1 forward".
        is_random: whether it draws random numbers, from the seed given with each call (an int64
            scalar on the device).
        num_inputs: number of arguments.
        num_buffers: buffers that the program takes (unused arguments are dropped, constants added).
    """

    # The ticket that the next program takes; None where the device keeps the order by itself.
    _next_ticket: ClassVar[torch.Tensor | None] = None

    def __init__(
        self,
        name: str,
        graph_hash: bytes,
        sources: Sequence[int | torch.Tensor | None],
        results: Sequence[int | tuple[int]],
        num_inputs: int,
        text: str,
        is_ordered: bool = False,
    ):
        self.name = name
        self.num_inputs = num_inputs
        self._is_ordered = is_ordered
        self.is_random = any(source is None for source in sources)
        self.num_buffers = len(sources)
        self._hash = graph_hash
        self._sources = tuple(sources)
        self._results = tuple(results)
        self._text = text

    def __call__(
        self, arguments: Sequence[torch.Tensor], seed: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Starts the program; returns its results at once, as tensors still being computed."""
        if self._is_ordered:
            arguments = [*arguments, Executable._next_ticket]
        buffers = [
            arguments[s] if type(s) is int else (seed if s is None else s) for s in self._sources
        ]
        computed = _xla._run_cached_graph(self._hash, buffers) if self._hash else []
        if self._is_ordered:
            Executable._next_ticket = computed.pop()
        return [computed[r] if type(r) is int else arguments[r[0]] for r in self._results]

    def text(self) -> str:
        """The program's HLO."""
        return self._text


class _Ticketed(torch.nn.Module):
    """A graph with a ticket as its last argument and its last result."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        *rest, ticket = arguments
        return [*self.module(*rest), ticket + 1]


def num_compilations() -> int:
    """Programs that XLA has compiled in this process so far."""
    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0


def compile_graph(
    name: str,
    module: torch.nn.Module,
    inputs: Sequence[TensorSpec],
    device: torch.device,
    keep_text: bool = False,
) -> Executable:
    """Compiles a graph module for the device.

    Args:
        name: for messages.
        module: takes one tensor per spec; returns a list of tensors.
        inputs: specs of its arguments.
        device: the XLA device.
        keep_text: whether to keep the program's HLO for `Executable.text`.

    Raises:
        LoweringError: an operator has no XLA lowering.
    """
    is_ordered = is_host_device()
    if is_ordered:
        module, inputs = _Ticketed(module), [*inputs, _TICKET]
    torch_xla.sync()
    xm.wait_device_ops()
    arguments = to_device([torch.zeros(spec.shape, dtype=spec.dtype) for spec in inputs], device)
    if is_ordered and Executable._next_ticket is None:
        Executable._next_ticket = arguments[-1]
    argument_of_id = {_xla._xla_get_tensor_id(a): i for i, a in enumerate(arguments)}
    torch_xla.sync()
    xm.wait_device_ops()
    outputs = _trace(name, module, arguments)
    results: list[int | tuple[int]] = []
    roots: list[torch.Tensor] = []
    index_of: dict[int, int] = {}
    for value in outputs:
        passed_on = argument_of_id.get(_xla._xla_get_tensor_id(value))
        if passed_on is not None:
            results.append((passed_on,))
            continue
        if id(value) not in index_of:
            index_of[id(value)] = len(roots)
            roots.append(value)
        results.append(index_of[id(value)])
    if is_ordered:
        results.pop()
    if len(roots) == is_ordered:  # nothing to compute but the ticket
        return Executable(name, b"", (), results, len(inputs) - is_ordered, "")
    sources = _program_inputs(roots, argument_of_id)
    text = _xla._get_xla_tensors_hlo(roots) if keep_text else ""
    graph_hash = _xla._get_graph_hash(roots)
    _xla._xla_warm_up_cache(roots, [])
    _xla._clear_pending_irs(str(device))
    return Executable(
        name, graph_hash, sources, results, len(inputs) - is_ordered, text, is_ordered
    )


def _program_inputs(
    roots: Sequence[torch.Tensor], argument_of_id: dict[int, int]
) -> list[int | torch.Tensor | None]:
    """For each buffer of the program: an argument's index, None (the seed), or a constant."""
    seed_id = _xla._get_seed_info_id()
    ids, values = _xla._get_tensors_xla_device_data_node(list(roots))
    sources: list[int | torch.Tensor | None] = []
    for tensor_id, value in zip(ids, values, strict=True):
        if tensor_id in argument_of_id:
            sources.append(argument_of_id[tensor_id])
        else:
            sources.append(None if tensor_id == seed_id else value)
    return sources


def _trace(
    name: str, module: torch.nn.Module, arguments: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Runs the module lazily; every operator must have an XLA lowering."""
    before = _fallbacks()
    with torch.no_grad():
        outputs = list(module(*arguments))
    fallen = {k: v for k, v in _fallbacks().items() if v != before.get(k, 0)}
    if fallen:
        _xla._clear_pending_irs(str(arguments[0].device if arguments else torch_xla.device()))
        raise LoweringError(_fallback_text(name, module, sorted(fallen)))
    return outputs


def _fallbacks() -> dict[str, int]:
    return {
        counter: metrics.counter_value(counter)
        for counter in metrics.counter_names()
        if counter.startswith("aten::")
    }


def _fallback_text(name: str, module: torch.nn.Module, operators: Sequence[str]) -> str:
    lines = [f"{name}: operators without an XLA lowering:"]
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    nodes = list(itertools.chain.from_iterable(graph.nodes for graph in graphs))
    for operator in operators:
        # A view of a functional graph runs as its `_copy`.
        names = (operator, operator.removesuffix("_copy"))
        places = sorted({_place(n) for n in nodes if _operator_name(n) in names})
        lines.append(f"  {operator} in {', '.join(places) or 'the derivative of the stage'}")
    lines.append(
        "They would run on the host and break the compiled step. Replace them in the model, or "
        "move that computation out of the step function."
    )
    return "\n".join(lines)


def _operator_name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""


def _place(node: fx.Node) -> str:
    line = (node.meta.get("stack_trace") or "").strip().split("\n")[-1].strip()
    where = module_path(node) or "the step function"
    return f"{where} ({line})" if line else where
