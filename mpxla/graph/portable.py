"""Graphs in files: rows of plain data, a row for each node, that name earlier nodes by number.

Torch's `GraphPickler` takes twice as long to read them, at each start of a job.
"""

import functools
import io
import pickle
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx._lazy_graph_module import _make_graph_module  # pyright: ignore[reportPrivateUsage]

__all__ = ["dumped", "loaded"]

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


def dumped(
    value: Any, spec_of: Callable[[torch.Tensor], Hashable], metas: Collection[str] = ()
) -> bytes:
    """A value with graphs in it, for `loaded`. Nodes know what they compute and come from.

    Args:
        value: data that can be pickled, and modules of graphs.
        spec_of: of the value of a node.
        metas: what else nodes keep of their metadata.
    """
    file = io.BytesIO()
    _Writer(file, spec_of, metas).dump(value)
    return file.getvalue()


def loaded(content: bytes, stand_in: Callable[[Any], torch.Tensor]) -> Any:
    """What `dumped` has written.

    Args:
        content: was written by this library.
        stand_in: makes the value of a node from its spec.
    """
    return _Reader(io.BytesIO(content), stand_in).load()


class _Spec:
    """Stands for a value."""

    def __init__(self, spec: Hashable):
        self.spec = spec


class _Writer(pickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        spec_of: Callable[[torch.Tensor], Hashable],
        metas: Collection[str],
    ):
        super().__init__(file)
        self._spec_of, self._metas = spec_of, metas
        self._numbers: dict[fx.Node, int] = {}
        self._shared: dict[Any, Any] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, fx.Node):
            return self._numbers[obj]
        if isinstance(obj, _Spec):
            return "value", obj.spec
        if isinstance(obj, fx.GraphModule):
            return "graph", *self._rows(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (OpOverload, OpOverloadPacket)):
            return _operator, tuple(str(obj).split("."))
        if isinstance(obj, HigherOrderOperator):
            return _operator, ("higher_order", obj.name())
        return NotImplemented

    def _rows(self, module: fx.GraphModule) -> tuple[dict[str, Any], int, bytes]:
        """What the graph reads of its module, and its nodes."""
        file = io.BytesIO()
        writer = _Writer(file, self._spec_of, self._metas)
        held: dict[str, Any] = {}
        for node in module.graph.nodes:
            if node.op == "get_attr":
                path = str(node.target)
                held[path] = functools.reduce(getattr, path.split("."), module)
            call = node.op, node.target, node.args, node.kwargs, node.name, node.type
            writer.dump((call, self._meta(node)))
            writer._numbers[node] = len(writer._numbers)
        return held, len(module.graph.nodes), file.getvalue()

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        meta = {k: node.meta[k] for k in self._metas if k in node.meta}
        if "val" in node.meta:
            meta["val"] = pytree.tree_map_only(
                torch.Tensor, lambda value: _Spec(self._spec_of(value)), node.meta["val"]
            )
        if "stack_trace" in node.meta:
            meta["stack_trace"] = self._one(node.meta["stack_trace"])
        for name in _STACKS:
            if node.meta.get(name):  # with classes, which need not be there again
                entries = ((key, path) for key, (path, _) in node.meta[name].items())
                stack = self._one(tuple(entries))
                meta[name] = {key: (path, "") for key, path in stack}
        return meta

    def _one(self, value: Any) -> Any:
        """The same object for equal values: it is written once."""
        return self._shared.setdefault(value, value)


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, stand_in: Callable[[Any], torch.Tensor]):
        super().__init__(file)
        self._stand_in = stand_in
        self._nodes: list[fx.Node] = []

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is int:
            return self._nodes[pid]
        kind, *rest = pid
        return self._stand_in(*rest) if kind == "value" else self._module(*rest)

    def _module(self, held: dict[str, Any], num_nodes: int, rows: bytes) -> fx.GraphModule:
        graph = fx.Graph()
        reader = _Reader(io.BytesIO(rows), self._stand_in)
        for _ in range(num_nodes):
            call, meta = reader.load()
            node = graph.create_node(*call)
            node.meta = meta
            reader._nodes.append(node)
        return _make_graph_module(held, graph)


def _operator(*names: str) -> Any:
    return functools.reduce(getattr, names, torch.ops)
