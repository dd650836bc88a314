"""Stage programs with collectives inside, executed by XLA in the processes of a group.

For the transport `xla` between CPU processes: the program of a stage, with its collectives, is one
program of that transport, executed by the client of `cpu_world.py`. Its arguments go through the
host, as those of the transport's other programs do. So what an accelerator would get is tried
without one; between pieces (`stage/collective.py`) the same training is faster on a CPU.

Random programs are not fused: their seed is no argument that another client knows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mpxla.comm.mesh import Mesh
from mpxla.comm.transport import Groups, Members
from mpxla.comm.xla import XlaTransport
from mpxla.comm.xla_programs import GraphProgram, Operand
from mpxla.graph.collectives import is_collective
from mpxla.graph.stepgraph import is_random
from mpxla.graph.typed import computed_results
from mpxla.stage.spec import TensorSpec

__all__ = ["FusedExecutable", "fuse"]


class FusedExecutable:
    """A program of a group; see `Executable`. Every member calls it, and waits for the results.

    For `results` see `computed_results`.
    """

    is_random = False

    def __init__(
        self,
        program: GraphProgram,
        results: Sequence[int | tuple[int]],
        transport: XlaTransport,
        put: Callable[[Sequence[torch.Tensor]], list[Any]],
    ):
        self.name = program.name
        self._program = program
        self._results = tuple(results)
        self._transport = transport
        self._put = put

    def __call__(self, arguments: Sequence[Any], seed: Any = None) -> list[Any]:
        """Runs the program together with the other members."""
        found = self._transport.run_program(self._program, arguments).result()
        pairs = zip(found, self._program.results, strict=True)
        computed = self._put([value.to(s.dtype).reshape(s.shape) for value, s in pairs])
        return [computed[r] if isinstance(r, int) else arguments[r[0]] for r in self._results]


def fuse(
    name: str,
    module: fx.GraphModule,
    inputs: Sequence[TensorSpec],
    groups: Groups,
    collectives: Mapping[Any, Callable[..., Any]],
    put: Callable[[Sequence[torch.Tensor]], list[Any]],
) -> FusedExecutable | None:
    """A graph as one program, if its collectives can be part of it.

    Args:
        name: for messages.
        module: functional; every node of its graph knows its value (`meta["val"]`).
        inputs: specs of its arguments.
        groups: by the names in the graph.
        collectives: operator -> what a backend's program has for it: (mesh, value, options) ->
            value.
        put: host tensors as values of the device.

    Returns:
        None where the pieces have to run one by one.
    """
    graph = module.graph
    members = _the_group(graph, groups, collectives)
    if members is None or not isinstance(members.transport, XlaTransport):
        return None
    if any(is_random(node) for node in graph.nodes):
        return None
    wanted, results = computed_results(graph)
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copy.graph_copy(graph, copies)
    copy.output([copies[node] for node in wanted])
    mesh = Mesh((members.ranks,))
    for node in copy.nodes:
        if is_collective(node):
            node.target = _in_mesh(collectives, node.target, mesh)
            node.args = node.args[:-1] if len(node.args) > 1 else node.args
    program = GraphProgram(
        name,
        mesh,
        tuple(Operand(spec.shape, spec.dtype) for spec in inputs),
        fx.GraphModule(module, copy),
        tuple(Operand(tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in wanted),
    )
    return FusedExecutable(program, results, members.transport, put)


def _the_group(
    graph: fx.Graph, groups: Groups, collectives: Mapping[Any, Callable[..., Any]]
) -> Members | None:
    """The one group of a graph's collectives, all of which can be traced."""
    started = [n for n in graph.nodes if is_collective(n) and len(n.args) > 1]
    names = {str(node.args[-1]) for node in started}
    if len(names) != 1 or not all(node.target in collectives for node in started):
        return None
    return groups.get(names.pop())


def _in_mesh(table: Mapping[Any, Callable[..., Any]], target: Any, mesh: Mesh) -> Any:
    function = table[target]

    def call(value: Any, *args: Any) -> Any:
        return function(mesh, value, *args)

    call.__name__ = str(target).rpartition(".")[0].replace(".", "_")
    return call
