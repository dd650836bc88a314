"""Modules as flat graphs of operators, each of which knows the value that it gives.

Graphs of the lowering are taken as they are; a stage's backward is flattened as it stands; other
modules (the optimizer's update, packing) are traced on fake tensors of the processor.
"""

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mpxla.device.pjrt.graphs import decompositions
from mpxla.errors import LoweringError
from mpxla.stage.accumulation import AccumulatingBackward
from mpxla.stage.pieces import annotate
from mpxla.stage.spec import TensorSpec
from mpxla.stage.split_backward import flatten_backward
from mpxla.stage.writes import replace_writes

__all__ = ["flat_graph"]

_aten = torch.ops.aten
_CPU = torch.device("cpu")


def flat_graph(name: str, module: torch.nn.Module, inputs: Sequence[TensorSpec]) -> fx.GraphModule:
    """A module as one graph.

    Args:
        name: for messages.
        module: takes one tensor per spec; returns a list of tensors.
        inputs: specs of its arguments.

    Raises:
        LoweringError: it cannot be traced.
    """
    if isinstance(module, AccumulatingBackward):
        graph = flatten_backward(module, len(inputs), _CPU)
        return _annotated(graph, inputs, module.derivative)
    if isinstance(module, fx.GraphModule) and not _mutates(module.graph):
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, val_map={}))
        return _annotated(graph, inputs, module)
    return _traced(name, module, inputs)


def _annotated(
    graph: fx.Graph, inputs: Sequence[TensorSpec], root: torch.nn.Module
) -> fx.GraphModule:
    annotate(graph, inputs, root)
    _name_operators(graph)  # parts of a split backward have methods, too
    return fx.GraphModule(root, graph)


def _name_operators(graph: fx.Graph) -> None:
    """Writes what surrounds a derivative (sums, the seed) with ATen's operators."""
    for node in graph.nodes:
        if node.target in (operator.add, torch.add):
            node.target = _aten.add.Tensor
        elif node.op == "call_method" and node.target == "expand":
            node.op, node.target = "call_function", _aten.expand.default
        elif node.op == "call_method" and node.target == "to":
            node.op, node.target = "call_function", _aten._to_copy.default
            node.args, node.kwargs = node.args[:1], {"dtype": node.args[1]}


def _mutates(graph: fx.Graph) -> bool:
    operators = [n.target for n in graph.nodes if isinstance(n.target, OpOverload)]
    return any(op._schema.is_mutable for op in operators)


def _traced(name: str, module: torch.nn.Module, inputs: Sequence[TensorSpec]) -> fx.GraphModule:
    """What it does on fake tensors, with operators that change nothing in place."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        arguments = [torch.empty(s.shape, dtype=s.dtype, device=_CPU) for s in inputs]

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return list(module(*tensors))

    table = dict(decompositions())
    try:
        with torch.no_grad(), mode, enable_python_dispatcher():
            graph = make_fx(call, decomposition_table=table)(*arguments)
            if not replace_writes(graph, table):
                # Of the graph, not of the module: making a parameter would lose the wrapper.
                functional = torch.func.functionalize(graph, remove="mutations")
                graph = make_fx(functional, decomposition_table=table)(*arguments)
                _drop_writes(graph.graph)
        _drop_marks(graph.graph)
    except AssertionError:
        raise  # a module's own refusal, such as that of an optimizer
    except Exception as error:  # torch raises anything while it traces
        raise LoweringError(
            f"{name} cannot be traced: {type(error).__name__}: {error}. Shapes must not depend on "
            f"values."
        ) from error
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _drop_marks(graph: fx.Graph) -> None:
    """Takes out what tells PyTorch's profiler where it is, as optimizers do from torch 2.15 on.

    Else the program would be cut there, to run these operators on the host.
    """
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)


def _drop_writes(graph: fx.Graph) -> None:
    """Takes out the writes to arguments that end a functional graph: results hold the values."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
