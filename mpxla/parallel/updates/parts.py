"""An optimizer's update as several programs, where programs take no memory of their arguments.

One program would have all parameters and state twice, as they were and as they are then: AdamW in
float32 needs three models of memory more for that. Of several, each changes some of the parameters,
and what those were is let go before the next one starts.
"""

from collections.abc import Collection, Sequence

from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module  # pyright: ignore[reportPrivateUsage]

from mpxla.device.backend import Backend, Buffer, Executable
from mpxla.graph.split import ancestors, copy_nodes
from mpxla.graph.typed import outputs_of
from mpxla.stage.spec import TensorSpec

__all__ = ["UpdateInParts", "update_in_parts"]

PART_BYTES = 64 << 20
"""Of results, or more where there would be too many parts. A smaller update is not divided: every
part waits for the one before."""
_MAX_PARTS = 8
_FEW_BYTES = 64
"""What parts may share: counts of steps, rates, keys of random numbers. Each computes with them."""


class UpdateInParts:
    """Some programs as one `Executable`, which takes the memory of its arguments.

    The list of arguments it is called with loses what is replaced; new values take the places. So
    the caller has a value of everything, also after an error in the middle. Each part comes with
    the places of its arguments and of its results; `changed` has the place among all arguments that
    each result replaces.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[tuple[Executable, Sequence[int], Sequence[int]]],
        changed: Sequence[int],
        backend: Backend,
    ):
        self.name = name
        self.is_random = any(program.is_random for program, _, _ in parts)
        self._parts = parts
        self._changed = changed
        self._backend = backend
        self._last_use = {i: k for k, (_, inputs, _) in enumerate(parts) for i in inputs}

    def __call__(self, arguments: list[Buffer], seed: Buffer | None = None) -> list[Buffer]:
        """See `Executable`; waits for all parts but the last."""
        results: list[Buffer | None] = [None] * len(self._changed)
        for number, (program, inputs, outputs) in enumerate(self._parts):
            if number:
                self._backend.wait()  # else memory is taken for this part before that one's is free
            values = program([arguments[i] for i in inputs])
            for place, value in zip(outputs, values, strict=True):
                results[place] = value
            for value, place in zip(results, self._changed, strict=True):
                if value is not None and self._last_use.get(place, 0) <= number:
                    arguments[place] = value
        return results


def update_in_parts(
    name: str,
    module: fx.GraphModule,
    inputs: Sequence[TensorSpec],
    changed: Sequence[int],
    backend: Backend,
) -> UpdateInParts | None:
    """Compiles an update in parts; None where it is small, or where all depends on all.

    `changed` is that of `UpdateInParts`.
    """
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    large = {n for n, spec in zip(placeholders, inputs, strict=True) if spec.num_bytes > _FEW_BYTES}
    results = outputs_of(graph)
    together = _dependent(graph, large)
    sizes: dict[fx.Node | None, int] = {}
    for result, place in zip(results, changed, strict=True):
        root = together.get(result)
        sizes[root] = sizes.get(root, 0) + inputs[place].num_bytes
    total = sum(sizes.values())
    count = min(total // PART_BYTES, _MAX_PARTS)
    part_of, before = dict[fx.Node | None, int](), 0
    for root, size in sizes.items():
        part_of[root] = before * count // total if total else 0
        before += size
    numbers = sorted({*part_of.values()})
    if len(numbers) < 2:
        return None
    parts: list[tuple[Executable, list[int], list[int]]] = []
    for number in numbers:
        outputs = [j for j, node in enumerate(results) if part_of[together.get(node)] == number]
        needed = ancestors([results[j] for j in outputs])
        taken = [i for i, node in enumerate(placeholders) if node in needed]
        nodes = [n for n in graph.nodes if n in needed and n.op != "placeholder"]
        part = copy_nodes([placeholders[i] for i in taken], nodes, [results[j] for j in outputs])
        title = f"{name}, part {len(parts) + 1} of {len(numbers)}"
        own = _make_graph_module(module, part)
        parts.append((backend.compile(title, own, [inputs[i] for i in taken]), taken, outputs))
    return UpdateInParts(name, parts, changed, backend)


def _dependent(graph: fx.Graph, large: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For nodes that follow from large arguments, one that stands for all that share any."""
    parents: dict[fx.Node, fx.Node] = {node: node for node in large}

    def root(node: fx.Node) -> fx.Node:
        while parents[node] is not node:
            node = parents[node]
        return node

    for node in graph.nodes:
        if node.op == "output":
            continue
        for source in node.all_input_nodes:
            if source in parents:
                parents[root(source)] = root(parents.setdefault(node, source))
    return {node: root(node) for node in parents}
