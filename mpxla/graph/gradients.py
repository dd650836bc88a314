"""`torch.autograd.grad` in a step function: gradients as values that the step goes on with.

Gradient penalties, forces as derivatives of an energy and steps of an inner optimizer need them.
While a step is captured, one operator stands for a call, since the tracer sees no derivative: it
works above autograd. In the functional graph the operators of PyTorch's derivative take its place.
They read what is there already, and repeat what is inside of composite operators. Stages
differentiate them like all others.

This module must not know about stages.
"""

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils.weak import WeakTensorKeyDictionary

from mpxla.errors import CaptureError
from mpxla.graph.capture.flags import Flags
from mpxla.graph.functions import applied
from mpxla.graph.normalize import free_layouts, has_writes
from mpxla.graph.recurrent import LAYER, unrolled
from mpxla.graph.split import ancestors
from mpxla.graph.stepgraph import describe, is_random
from mpxla.graph.typed import (
    arguments_of,
    input_of,
    origin_of,
    outputs_of,
    result_of,
    target_of,
)
from mpxla.graph.user_code import line_of

__all__ = [
    "GRADIENTS_OF",
    "LEAF",
    "Gradients",
    "as_tuple",
    "copied",
    "expand_call",
    "expand_gradients",
    "is_differentiated_by",
    "path_of",
    "without_detaches",
]

_aten = torch.ops.aten
_library = torch.library.Library("mpxla_gradients", "DEF")
_library.define("leaf(Tensor tensor, bool from_start=False) -> Tensor")
_library.define(
    "of(Tensor[] results, Tensor[] leaves, Tensor[] seeds, bool create_graph) -> Tensor[]"
)
_operators = torch.ops.mpxla_gradients
LEAF, GRADIENTS_OF = _operators.leaf.default, _operators.of.default


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.tensors = inputs[:3]


def _zeros(ctx: Any, _: Any) -> tuple[Any, ...]:
    """Gradients depend on all that is given; while a step is captured they have no values."""
    return *([torch.zeros_like(tensor) for tensor in given] for given in ctx.tensors), None


_library.impl("leaf", lambda tensor, _=False: tensor.clone(), "CompositeExplicitAutograd")
_library.impl(
    "of", lambda _, leaves, *__: [torch.empty_like(x) for x in leaves], "CompositeExplicitAutograd"
)
torch.library.register_autograd(
    "mpxla_gradients::of", _zeros, setup_context=_keep_inputs, lib=_library
)


class Gradients:
    """Calls of `torch.autograd.grad` while one step is captured.

    Args:
        flags: of the model's parameters.
        first_of: gives what stands for a tensor as it was before hidden writes; itself without any.
    """

    def __init__(self, flags: Flags, first_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._flags, self._first_of = flags, first_of
        self._leaves: Any = WeakTensorKeyDictionary()

    def becomes_leaf(self, tensor: torch.Tensor) -> None:
        """Says that what is computed with a tensor depends on it from here on, not before."""
        if tensor.is_floating_point() and not tensor.requires_grad:
            # Outside of a region without gradients, which hands out others than it computes with.
            with torch.enable_grad():
                self._leaves[tensor] = LEAF(tensor)

    def is_outside(self, outputs: Any) -> bool:
        """Whether what a function of the user's differentiates was made before, in the step."""
        known = cast(Any, get_proxy_mode()).tracer.tensor_tracker
        return all(type(t) is FakeTensor and t not in known for t in as_tuple(outputs))

    def grad(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """What `torch.autograd.grad` returns, as values of the captured step."""
        results, leaves = as_tuple(outputs), as_tuple(inputs)
        if any(map(self._flags.is_frozen, leaves)):
            raise RuntimeError("One of the differentiated Tensors does not require grad")
        seeds: Any = (None,) * len(results) if grad_outputs is None else as_tuple(grad_outputs)
        unused = materialize_grads if allow_unused is None else allow_unused
        if is_grads_batched:  # one after the other
            each = [
                self.grad(results, leaves, row, None, create_graph, True, unused, False, True)
                for row in zip(*seeds, strict=True)
            ]
            return tuple(torch.stack(found) for found in zip(*each, strict=True))  # pyright: ignore[reportArgumentType]
        with _disable_current_modes(), DisableTorchFunction():
            # Torch's own check of the call, and which gradients there are none of. In a hook, seeds
            # may be functional, and of no use without their mode.
            like: Any = [
                s if s is None else r.new_empty(s.shape, dtype=s.dtype)
                for r, s in zip(results, seeds, strict=True)
            ]
            keys = {"retain_graph": True, "allow_unused": unused}
            found: Any = torch.autograd.grad(results, leaves, like, **keys)
        pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if r.requires_grad]
        given = [torch.ones_like(r) if s is None else s for r, s in pairs]
        used = [leaf for leaf, g in zip(leaves, found, strict=True) if g is not None]
        asked = [self._leaves.get(leaf, self._first_of(leaf)) for leaf in used]
        with torch.set_grad_enabled(create_graph):
            gradients: list[torch.Tensor | None] = list(
                GRADIENTS_OF([r for r, _ in pairs], asked, given, create_graph)
            )
        for place, leaf in enumerate(leaves):
            if found[place] is None:
                gradients.insert(place, torch.zeros_like(leaf) if materialize_grads else None)
        return tuple(gradients)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One tensor, or several."""
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def is_differentiated_by(node: fx.Node, tensor: fx.Node) -> bool:
    """Whether a node is a call of `torch.autograd.grad` that asks for the gradient of a tensor."""
    return node.target is GRADIENTS_OF and tensor in arguments_of(node)[1]


def copied(old: torch.Tensor, new: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """An assignment to a part of a tensor; torch has no derivative for the operator itself."""
    return new.to(old.dtype).expand(old.shape)


_WITH_DERIVATIVES = {LAYER: unrolled, _aten.copy.default: copied}
"""Functions in the place of operators that have no derivative."""


def expand_gradients(graph: fx.Graph) -> None:
    """Puts the operators of derivatives in the place of calls of `torch.autograd.grad`.

    Args:
        graph: of a functional step; it is changed in place.

    Raises:
        CaptureError: PyTorch knows no derivative.
    """
    for call in graph.find_nodes(op="call_function", target=GRADIENTS_OF):
        expand_call(graph, call)
    for node in graph.find_nodes(op="call_function", target=LEAF):
        node.replace_all_uses_with(input_of(node))
        graph.erase_node(node)
    free_layouts(graph)


def expand_call(graph: fx.Graph, call: fx.Node) -> None:
    """Puts the operators of derivatives in the place of one call; see `expand_gradients`."""
    results, leaves, seeds, create_graph = arguments_of(call)
    since = [without_detaches(leaf) for leaf in leaves]
    sources = [input_of(n) if n.target is LEAF else n for n in since]
    for node in path_of(graph, call, results, since):
        _open_random(graph, node)
    path = path_of(graph, call, results, since)
    roots = [n for n in dict.fromkeys(sources) if n not in path]
    read = [n for node in path for n in node.all_input_nodes] + list(seeds)
    outside = [n for n in dict.fromkeys(read) if n not in {*path, *roots}]

    def gradients(*values: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip([*roots, *outside], values, strict=True))
        for node in path:
            args, kwargs = cast(Any, fx.map_arg((node.args, node.kwargs), lambda n: env[n]))
            own = _WITH_DERIVATIVES.get(node.target) or applied(node.target, lambda part: part)
            function = own or target_of(node)
            env[node] = function(*args, **kwargs)
        found: Any = torch.autograd.grad(
            [env[n] for n in results],
            [env[n] for n in sources],
            [env[n] for n in seeds],
            create_graph=create_graph,  # some derivatives then have another form, which has one
            allow_unused=True,
        )
        pairs = zip(sources, found, strict=True)
        filled = (torch.zeros_like(env[n]) if g is None else g for n, g in pairs)
        return [*(env[n] for n in tensors), *filled]

    tensors = [n for n in path if isinstance(n.meta["val"], torch.Tensor)]
    traced = _traced(gradients, [*roots, *outside], len(roots), call)
    inputs = [n for n in traced.nodes if n.op == "placeholder"]
    ends = outputs_of(traced)
    known = dict(zip(inputs, [*roots, *outside], strict=True))
    for end, node in zip(ends, tensors, strict=False):
        known.setdefault(end, node)
        if _is_same_part(end, node):  # the derivative may read others of its parts
            known.setdefault(input_of(end), input_of(node))
    found = _copied(graph, call, ends[len(tensors) :], known)
    for user in list(call.users):
        user.replace_all_uses_with(found[arguments_of(user)[1]])
        graph.erase_node(user)
    graph.erase_node(call)


def without_detaches(node: fx.Node) -> fx.Node:
    """A leaf that a region without gradients has handed out."""
    start = node
    while start.target in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
        start = input_of(start)
    return start if start.target is LEAF else node


def path_of(
    graph: fx.Graph, call: fx.Node, results: Sequence[fx.Node], since: Sequence[fx.Node]
) -> dict[fx.Node, None]:
    """Nodes through which results depend on what they are differentiated by, in order."""
    dependent = {n for n in since if n.target is not LEAF}
    dependent |= {input_of(n) for n in since if n.target is LEAF and arguments_of(n)[1:] == (True,)}
    nodes: list[fx.Node] = []
    for node in graph.nodes:
        if node is call:
            break
        if node in since and node.target is LEAF:
            dependent.add(input_of(node))
        elif node.target is not _aten.detach.default and not dependent.isdisjoint(
            node.all_input_nodes
        ):
            dependent.add(node)
            nodes.append(node)
    path = dict.fromkeys(nodes)
    needed = ancestors(results, lambda n: n not in path)
    return dict.fromkeys(n for n in nodes if n in needed)


def _open_random(graph: fx.Graph, node: fx.Node) -> None:
    """Divides a node that draws random numbers inside, so that its derivative reads the same."""
    if not is_random(node) or not isinstance(node.meta["val"], torch.Tensor):
        return
    inputs = node.all_input_nodes

    def run(*values: Any) -> list[Any]:
        return [result_of(node, dict(zip(inputs, values, strict=True)))]

    traced = _traced(run, inputs, 0, node)
    if not any(is_random(n) for n in traced.nodes):
        return  # attention without dropout, say, which is one operator then
    known = dict(zip((n for n in traced.nodes if n.op == "placeholder"), inputs, strict=True))
    [value] = _copied(graph, node, outputs_of(traced), known, is_inside=True)
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _traced(function: Any, inputs: Sequence[fx.Node], num_leaves: int, at: fx.Node) -> fx.Graph:
    """A function of values like those of some nodes as a graph below autograd."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    specs = [node.meta["val"] for node in inputs]
    with mode:
        values = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, requires_grad=i < num_leaves)
            for i, v in enumerate(specs)
        ]
    # Only the plain forms of attention and recurrent layers have a derivative that has one.
    plain = sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False)
    quiet = warnings.catch_warnings(action="ignore", category=UserWarning)  # the second tells more
    with torch.enable_grad(), mode, quiet, plain[0], plain[1]:
        try:
            module = make_fx(function)(*values)
            if has_writes(module.graph):
                module = make_fx(dispatch_functionalize(function))(*values)
        except (RuntimeError, NotImplementedError) as error:
            text = str(error).strip().split("\n")[0]
            raise CaptureError(
                f"torch.autograd.grad in a step function{line_of(at)}: PyTorch has no derivative "
                f"of what is differentiated there ({type(error).__name__}: {text})."
            ) from error
    return module.graph


def _is_same_part(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes are the same one of the results of the same operator."""
    parts = (operator.getitem, operator.getitem)
    if (one.target, other.target) != parts or one.args[1] != other.args[1]:
        return False
    return input_of(one).target is input_of(other).target


def _copied(
    graph: fx.Graph,
    before: fx.Node,
    ends: Sequence[fx.Node],
    known: Mapping[fx.Node, fx.Node],
    is_inside: bool = False,
) -> list[fx.Node]:
    """Copies what some nodes need to before a node of another graph, where some are known."""
    copies = dict(known)
    with graph.inserting_before(before):
        for node in sorted(ancestors(ends, known.__contains__) - known.keys()):
            if node.op != "call_function" or (is_random(node) and not is_inside):
                raise CaptureError(
                    f"torch.autograd.grad in a step function{line_of(before)}: {describe(node)} "
                    f"cannot be part of what is differentiated there."
                )
            if node.target is _aten.detach.default:
                # How autograd reads what it has saved; second derivatives flow through that.
                copies[node] = copies[input_of(node)]
                continue
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta = {**origin_of(before), "val": node.meta.get("val")}
    return [copies[end] for end in ends]
