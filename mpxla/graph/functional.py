"""From a traced program to a functional one, without preparing operators that it does not have.

`ExportedProgram.run_decompositions({})` keeps composite operators (`linear`, `layer_norm`) as they
are. For that it registers kernels for every composite operator of torch and takes them away again
(torch 2.9), which takes longer than all the rest for a small program. It also forgets from which
module and line the operators under `torch.autocast` and `torch.no_grad` are; here they keep it.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
import torch.export.exported_program as exported_program
from torch import fx, nn
from torch._export.utils import _is_preservable_cia_op  # pyright: ignore[reportPrivateUsage]
from torch._higher_order_ops.wrap import WrapWithAutocast, WrapWithSetGradEnabled
from torch._ops import OpOverload

from mpxla.graph.exchanged import exchanged
from mpxla.graph.normalize import has_writes

__all__ = ["functionalize"]


def functionalize(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Makes a program functional; its composite operators stay.

    Args:
        program: as `torch.export.export` gives it.

    Returns:
        The program without writes into tensors, except as outputs of its signature.
    """
    _read_tied_once(program)
    found = _composites(program.graph_module)
    limited = exchanged(exported_program, _collect_all_valid_cia_ops=lambda: found)
    with limited, _regions_with_origin():
        return program.run_decompositions({})


def _read_tied_once(program: torch.export.ExportedProgram) -> None:
    """Lets tied parameters be read by their first names, in place, where a program writes.

    Torch refuses a tensor that is an input twice and written to; what is read by no other name may
    be another tensor there.
    """
    parts = [m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    if not any(has_writes(part.graph) for part in parts):
        return
    state: dict[str, Any] = program.state_dict
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    first: dict[int, fx.Node] = {}
    for spec in program.graph_signature.input_specs:
        value = state.get(spec.target or "")
        node = placeholders.get(getattr(spec.arg, "name", ""))
        if not isinstance(value, nn.Parameter) or node is None:
            continue
        known = first.setdefault(id(value), node)
        if known is not node:
            node.replace_all_uses_with(known)
            state[spec.target or ""] = nn.Parameter(value.detach().clone(), value.requires_grad)


def _composites(module: fx.GraphModule) -> set[OpOverload]:
    """Composite operators of a program and of the programs in it."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    targets = {node.target for graph in graphs for node in graph.nodes}
    return {t for t in targets if isinstance(t, OpOverload) and _is_preservable_cia_op(t)}


@contextlib.contextmanager
def _regions_with_origin() -> Generator[None]:
    """Lets the nodes of a region keep their own metadata while the region is inlined.

    Torch calls the body as a function, so that all of its operators get the metadata of the node
    that stands for the region (torch 2.9). An interpreter sets that of each node. A region with
    gradients is traced without, like all else: torch would detach what its operators give.
    """

    def interpreting(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, WrapWithSetGradEnabled):
                args = (False, *args[1:])
            given = (fx.Interpreter(a).run if isinstance(a, fx.GraphModule) else a for a in args)
            return original(self, *given, **kwargs)

        return call

    autocast: Any = WrapWithAutocast
    gradients: Any = WrapWithSetGradEnabled
    with (
        exchanged(autocast, __call__=interpreting(autocast.__call__)),
        exchanged(gradients, __call__=interpreting(gradients.__call__)),
    ):
        yield
