"""A graph of ATen operators as a jax function.

Nodes whose operator the table has become calls of its functions. Others are written with operators
that it has, by PyTorch's decompositions, one node at a time; so a node keeps its place in the
user's program, which errors name. What is left can run on the host only, or not at all.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mpxla.device.pjrt.operators as operators
from mpxla.device.pjrt.arrays import from_constant
from mpxla.device.pjrt.dtypes import jax_dtype
from mpxla.device.pjrt.table import FUNCTIONS, IGNORED, RANDOM
from mpxla.errors import LoweringError
from mpxla.graph.casts import without_autocast
from mpxla.graph.stepgraph import describe
from mpxla.graph.typed import arguments_of
from mpxla.stage.solvers import OF_FACTORS

__all__ = [
    "as_function",
    "decompositions",
    "inline_functions",
    "is_known",
    "is_random_graph",
    "traced_decompositions",
    "unknown_nodes",
]

assert operators.SUBJECTS, "importing them fills the table"

_aten = torch.ops.aten
_NOT_CORE = (
    *(_aten.grid_sampler_2d, _aten._fused_dropout, _aten.native_dropout, _aten.upsample_bicubic2d),
    *(_aten.dist, _aten.narrow_copy, _aten.rrelu_with_noise_backward, _aten.unbind_copy),
)
_WRITTEN_LATE = (
    *("gelu", "gelu_backward", "relu", "silu", "silu_backward", "elu", "leaky_relu", "hardtanh"),
    *("softplus", "log_sigmoid_forward", "log_sigmoid_backward", "threshold_backward"),
    *("sigmoid_backward", "tanh_backward", "_log_softmax_backward_data", "logsumexp"),
    *("count_nonzero", "linspace", "logaddexp", "logaddexp2", "heaviside"),
    *("sinc", "mvlgamma", "linalg_cross", "slice_scatter", "select_scatter", "max_unpool2d"),
    *("max_unpool3d", "embedding_dense_backward", "native_group_norm_backward"),
    "native_batch_norm_backward",
)
"""Operators that graphs keep: stages save what these take, and not what they are made of."""


@functools.cache
def decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """PyTorch's own ways to write operators that the table does not have.

    Dropout is among them: written as a product with a mask, it can be computed again from that.
    """
    table: dict[Any, Any] = {**core_aten_decompositions(), **get_decompositions(_NOT_CORE)}
    table |= {**OF_FACTORS, **get_decompositions([getattr(_aten, name) for name in _WRITTEN_LATE])}
    found = {op: f for op, f in table.items() if op not in FUNCTIONS and op not in RANDOM}
    # A part of others: of `renorm` in low precision.
    return {**found, torch.ops.prims.convert_element_type.default: torch.Tensor.to}


@functools.cache
def traced_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Those that stages are traced with."""
    late = {getattr(_aten, name) for name in _WRITTEN_LATE}
    return {op: f for op, f in decompositions().items() if op.overloadpacket not in late}


def is_known(target: object) -> bool:
    """Whether the table has this operator, or PyTorch takes it apart."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem or getattr(target, "__module__", "") == "_operator"
    return target in FUNCTIONS or target in RANDOM or target in decompositions()


def unknown_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that cannot become part of a program."""
    return [n for n in graph.nodes if n.op == "call_function" and not is_known(n.target)]


def is_random_graph(graph: fx.Graph) -> bool:
    """Whether the program draws random numbers."""
    return any(
        torch.Tag.nondeterministic_seeded in node.target.tags
        for node in graph.nodes
        if isinstance(node.target, OpOverload)
    )


def as_function(title: str, module: fx.GraphModule) -> Callable[..., list[jax.Array]]:
    """(key or None, arrays) -> arrays, for `jax.jit`; all nodes of the module know their values."""

    def call(key: jax.Array | None, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        run = _Evaluation(title, module, _Keys(key))
        return run(arrays)

    return call


def inline_functions(module: fx.GraphModule) -> None:
    """Writes calls of Python functions, as passes put them there, with operators of ATen, in place.

    Every node knows its value (`meta["val"]`); those functions give one tensor each.
    """
    for node in list(module.graph.nodes):
        if not isinstance(node.target, FunctionType):
            continue
        parts = _as_operators(node).graph
        for part in parts.nodes:
            if "val" in part.meta:
                part.meta = {**node.meta, "val": part.meta["val"]}
        given = [
            leaf
            for leaf in pytree.tree_leaves((node.args, node.kwargs))
            if isinstance(leaf, fx.Node)
        ]
        copies = dict(zip(parts.find_nodes(op="placeholder"), given, strict=True))
        with module.graph.inserting_before(node):
            (result,) = cast(list[fx.Node], module.graph.graph_copy(parts, copies))
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()


class _Keys:
    """One key for every random operator of a program, in order."""

    def __init__(self, key: jax.Array | None):
        self._key = key
        self._count = 0

    def next(self) -> jax.Array:
        assert self._key is not None, "random programs are called with a seed"
        self._count += 1
        return jax.random.fold_in(self._key, self._count)


class _Evaluation:
    """One pass over a graph with jax's arrays."""

    def __init__(self, title: str, module: fx.GraphModule, keys: _Keys):
        self._title = title
        self._module = module
        self._keys = keys

    def __call__(self, arguments: Sequence[jax.Array]) -> list[Any]:
        values: dict[fx.Node, Any] = {}
        remaining = iter(arguments)
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "get_attr":
                values[node] = from_constant(_attribute(self._module, str(node.target)))
            elif node.op == "output":
                return list(fx.map_arg(arguments_of(node)[0], values.__getitem__))
            else:
                values[node] = self._run(node, values)
        raise AssertionError("a graph ends with its output")

    def _run(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        try:
            return _as_traced(self._call(node, args, kwargs), node.meta.get("val"))
        except LoweringError:
            raise
        except Exception as error:  # jax raises anything while it traces
            raise LoweringError(
                f"{self._title}: {describe(node)} cannot be compiled: {error}. Write it with other "
                f"operators, or move it out of the step function."
            ) from error

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if not isinstance(target, OpOverload):
            return target(*args, **kwargs)
        kept = {k: v for k, v in kwargs.items() if k not in IGNORED}
        if target in FUNCTIONS:
            return FUNCTIONS[target](*_as_arrays(target, args), **kept)
        if target in RANDOM:
            return RANDOM[target](self._keys.next(), *args, **kept)
        parts = _decomposed(node)
        if parts is None:
            raise LoweringError(_refusal(self._title, node))
        arrays = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, jax.Array)]
        found = _Evaluation(self._title, parts, self._keys)(arrays)
        return found if isinstance(node.meta["val"], (tuple, list)) else found[0]


def _as_arrays(target: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers as arrays where the operator wants a tensor."""
    wanted = target._schema.arguments  # pyright: ignore[reportPrivateUsage]
    if not any(type(a) in (bool, int, float, complex) for a in args[:1]):
        return args
    if wanted and str(wanted[0].type) == "Tensor":
        return (jnp.asarray(args[0]), *args[1:])
    return args


def _refusal(title: str, node: fx.Node) -> str:
    return (
        f"{title}: {describe(node)} has no jax function, and PyTorch does not write it with other "
        f"operators. Write it with others in the model, or move that computation out of the step "
        f"function."
    )


def _attribute(module: torch.nn.Module, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), module)


def _as_traced(result: Any, expected: Any) -> Any:
    """The result in the dtypes that PyTorch gives it; other shapes are an error."""
    if isinstance(expected, torch.Tensor):
        wanted, shape = jax_dtype(expected.dtype), tuple(expected.shape)
        if result is None:
            return None
        result = result if isinstance(result, jax.Array) else jnp.asarray(result)
        if result.shape != shape:
            raise TypeError(f"the result has shape {list(result.shape)} in place of {list(shape)}")
        return result if result.dtype == wanted else result.astype(wanted)
    if isinstance(expected, (tuple, list)) and isinstance(result, (tuple, list)):
        # PyTorch leaves out gradients that nobody wants, as None or as nothing.
        return [
            None if e is None else _as_traced(r, e) for r, e in zip(result, expected, strict=True)
        ]
    return result


def _decomposed(node: fx.Node) -> fx.GraphModule | None:
    """The node's operator by others, on its shapes; None if PyTorch has no such way."""
    if node.target not in decompositions():
        return None
    module = _as_operators(node)
    for part in module.graph.nodes:
        for key in ("nn_module_stack", "stack_trace"):
            if key in node.meta:
                part.meta[key] = node.meta[key]
    return module


def _as_operators(node: fx.Node) -> fx.GraphModule:
    """What a node does, traced on its shapes: takes its tensors, in order, and gives a list."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _fake(n.meta["val"]))
    leaves, structure = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> list[Any]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, structure)
        kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
        found = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        return list(found) if isinstance(found, (tuple, list)) else [found]

    table = dict(decompositions())
    with torch.no_grad(), without_autocast(), mode:
        return make_fx(call, decomposition_table=table)(*[leaves[i] for i in places])


def _fake(value: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), value
    )
