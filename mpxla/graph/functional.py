"""From a traced program to a functional one, without preparing operators that it does not have.

`ExportedProgram.run_decompositions({})` keeps composite operators (`linear`, `layer_norm`) as they
are. For that it registers kernels for every composite operator of torch and takes them away again
(torch 2.9), which takes longer than all the rest for a small program.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.export.exported_program as exported_program
from torch import fx
from torch._export.utils import _is_preservable_cia_op

__all__ = ["functionalize"]


def functionalize(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Makes a program functional; its composite operators stay.

    Args:
        program: as `torch.export.export` gives it.

    Returns:
        The program without writes into tensors, except as outputs of its signature.
    """
    with _composites_limited_to(_composites(program.graph_module)):
        return program.run_decompositions({})


def _composites(module: fx.GraphModule) -> set[torch._ops.OpOverload]:
    """Composite operators of a program and of the programs in it."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    targets = {node.target for graph in graphs for node in graph.nodes}
    operators = {target for target in targets if isinstance(target, torch._ops.OpOverload)}
    return {operator for operator in operators if _is_preservable_cia_op(operator)}


@contextlib.contextmanager
def _composites_limited_to(operators: set[torch._ops.OpOverload]) -> Iterator[None]:
    found = exported_program._collect_all_valid_cia_ops
    exported_program._collect_all_valid_cia_ops = lambda: operators
    try:
        yield
    finally:
        exported_program._collect_all_valid_cia_ops = found
