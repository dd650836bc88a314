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
from torch._decomp import (
    _core_aten_decompositions_post_autograd,  # pyright: ignore[reportPrivateUsage]
    get_decompositions,
)
from torch._decomp.decompositions import native_batch_norm_helper
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mpxla.device.pjrt.operators as operators
from mpxla.device.pjrt.arrays import from_constant
from mpxla.device.pjrt.dtypes import jax_dtype
from mpxla.device.pjrt.table import FUNCTIONS, IGNORED, RANDOM
from mpxla.errors import LoweringError
from mpxla.graph.casts import without_autocast
from mpxla.graph.shapes import vector_norm
from mpxla.graph.stepgraph import describe
from mpxla.stage.solvers import OF_FACTORS
from mpxla.stage.spec import key_of_call

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
    *(_aten._native_batch_norm_legit, _aten.new_empty_strided),
    *(_aten.cauchy, _aten.geometric, _aten.log_normal),
)
_WRITTEN_LATE = (
    *("gelu", "gelu_backward", "relu", "silu", "silu_backward", "elu", "leaky_relu", "hardtanh"),
    *("softplus", "log_sigmoid_forward", "log_sigmoid_backward", "threshold_backward"),
    *("sigmoid_backward", "tanh_backward", "_log_softmax_backward_data", "logsumexp"),
    *("count_nonzero", "linspace", "logaddexp", "logaddexp2", "heaviside"),
    *("sinc", "mvlgamma", "linalg_cross", "slice_scatter", "select_scatter", "max_unpool2d"),
    *("max_unpool3d", "embedding_dense_backward", "native_group_norm_backward"),
    *("native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit_functional"),
    *("_native_batch_norm_legit_no_training", "im2col", "col2im", "index_add", "addr"),
    *("nll_loss_forward", "nll_loss2d_forward"),
    *("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"),
)
"""Operators that graphs keep: stages save what these take, and not what they are made of."""


@functools.cache
def decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """PyTorch's own ways to write operators that the table does not have.

    Dropout is among them: written as a product with a mask, it can be computed again from that.
    Composite operators are not: they come apart when they are called.
    """
    # `core_aten_decompositions` looks at every composite operator: 0.2 s at each start.
    table: dict[Any, Any] = {
        **_core_aten_decompositions_post_autograd(),
        **get_decompositions(_NOT_CORE),
    }
    table |= {**OF_FACTORS, _aten.linalg_vector_norm.default: vector_norm}
    table |= get_decompositions([getattr(_aten, name) for name in _WRITTEN_LATE])
    found = {op: f for op, f in table.items() if op not in FUNCTIONS and op not in RANDOM}
    # A part of others: of `renorm` in low precision.
    found[torch.ops.prims.convert_element_type.default] = torch.Tensor.to
    return {**found, _aten.native_batch_norm.default: _batch_norm}


def _batch_norm(*arguments: Any) -> tuple[torch.Tensor | None, ...]:
    """PyTorch's decomposition, without the writes to running statistics."""
    return native_batch_norm_helper(*arguments, functional=True)[:3]


@functools.cache
def traced_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Those that stages are traced with."""
    late = {getattr(_aten, name) for name in _WRITTEN_LATE}
    return {op: f for op, f in decompositions().items() if op.overloadpacket not in late}


def is_known(target: object) -> bool:
    """Whether the table has this operator, or PyTorch takes it apart."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem or getattr(target, "__module__", "") == "_operator"
    return target in FUNCTIONS or target in RANDOM or _comes_apart(target)


def _comes_apart(target: OpOverload) -> bool:
    is_composite = target._can_decompose()  # pyright: ignore[reportPrivateUsage]
    return is_composite or target in decompositions()


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
        return list(_Evaluation(_Program(title, key), module).run(*arrays))

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


class _Program:
    """What evaluations of a graph, and of the operators in it that are taken apart, share.

    Attributes:
        title: for messages.
    """

    def __init__(self, title: str, key: jax.Array | None):
        self.title = title
        self._key = key
        self._num_keys = 0
        self._parts: dict[Any, fx.GraphModule] = {}

    def next_key(self) -> jax.Array:
        """One key for every random operator, in order."""
        assert self._key is not None, "random programs are called with a seed"
        self._num_keys += 1
        return jax.random.fold_in(self._key, self._num_keys)

    def parts_of(self, node: fx.Node) -> fx.GraphModule | None:
        """The node's operator by others, on its shapes; None if PyTorch has no such way."""
        if not _comes_apart(cast(OpOverload, node.target)):
            return None
        key = key_of_call(node)
        if key not in self._parts:
            self._parts[key] = _as_operators(node)
        for part in self._parts[key].graph.nodes:
            for name in ("nn_module_stack", "stack_trace"):
                part.meta[name] = node.meta.get(name)
        return self._parts[key]


class _Evaluation(fx.Interpreter):
    """One pass over a graph with jax's arrays."""

    def __init__(self, program: _Program, module: fx.GraphModule):
        super().__init__(module)
        self.extra_traceback = False  # errors name the node
        self._program = program

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return from_constant(self.fetch_attr(target))

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        try:
            return _as_traced(self._call(n, args, kwargs), n.meta.get("val"))
        except LoweringError:
            raise
        except Exception as error:  # jax raises anything while it traces
            raise LoweringError(
                f"{self._program.title}: {describe(n)} cannot be compiled: {error}. Write it with "
                f"other operators, or move it out of the step function."
            ) from error

    def _call(self, node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if not isinstance(target, OpOverload):
            return target(*args, **kwargs)
        kept = {k: v for k, v in kwargs.items() if k not in IGNORED}
        if target in FUNCTIONS:
            return FUNCTIONS[target](*_as_arrays(target, args), **kept)
        if target in RANDOM:
            return RANDOM[target](self._program.next_key(), *args, **kept)
        parts = self._program.parts_of(node)
        if parts is None:
            raise LoweringError(
                f"{self._program.title}: {describe(node)} has no jax function, and PyTorch does "
                f"not write it with other operators. Write it with others in the model, or move "
                f"that computation out of the step function."
            )
        arrays = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, jax.Array)]
        found = _Evaluation(self._program, parts).run(*arrays)
        return found if isinstance(node.meta["val"], (tuple, list)) else found[0]


def _as_arrays(target: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers as arrays where the operator wants a tensor."""
    wanted = target._schema.arguments  # pyright: ignore[reportPrivateUsage]
    if not any(type(a) in (bool, int, float, complex) for a in args[:1]):
        return args
    if wanted and str(wanted[0].type) == "Tensor":
        return (jnp.asarray(args[0]), *args[1:])
    return args


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
