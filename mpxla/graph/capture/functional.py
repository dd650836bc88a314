"""From a traced program to a functional one, without running it again where that is not needed.

`ExportedProgram.run_decompositions({})` runs a program twice more, which takes longer than to trace
it. A program without writes is functional but for operators that may give a view of an argument or
a new tensor (`reshape`), or that write to tensors of their own (`dropout`). Those are replaced by
what they do with these arguments, and the rest stays as it is.

Other programs torch makes functional; composite operators (`linear`, `layer_norm`) stay as they are
there too. For that it registers kernels for every composite operator of torch and takes them away
again (torch 2.9), which takes longer than all the rest for a small program. It also forgets from
which module and line the operators under `torch.autocast` and `torch.no_grad` are; here they keep
it.
"""

import contextlib
import operator
from collections.abc import Generator
from typing import Any, cast

import torch
import torch.export.exported_program as exported_program
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _is_preservable_cia_op  # pyright: ignore[reportPrivateUsage]
from torch._higher_order_ops.utils import autograd_not_implemented
from torch._higher_order_ops.wrap import WrapWithAutocast, WrapWithSetGradEnabled
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from mpxla.graph.casts import active_autocast
from mpxla.graph.exchanged import exchanged
from mpxla.graph.fingerprint import layouts
from mpxla.graph.normalize import has_writes
from mpxla.graph.typed import arguments_of, input_of, origin_of, outputs_of, result_of, schema_of

__all__ = ["functionalize"]

_aten = torch.ops.aten


def functionalize(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Makes a program functional; its composite operators stay.

    Args:
        program: as `torch.export.export` gives it; it may be changed in place.

    Returns:
        The program without writes into tensors, except as outputs of its signature.
    """
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            _find_users(module.graph)
            _fit_copies(module.graph)
    # In a region of the caller's, torch casts arguments while the program runs again.
    if not active_autocast() and _replace_undecided(program.graph_module):
        return program
    _read_tied_once(program)
    found = _composites(program.graph_module)
    limited = exchanged(exported_program, _collect_all_valid_cia_ops=lambda: found)
    with limited, _regions_with_origin(), _derivatives_kept(program.graph_module):
        return program.run_decompositions({})


def _find_users(graph: fx.Graph) -> None:
    """Makes nodes know all of their users.

    Where export opens a piece between regions that has one result, this one forgets its users in
    the piece, and could be replaced or erased without them.
    """
    for node in graph.nodes:
        for used in node.all_input_nodes:
            used.users.setdefault(node)


def _fit_copies(graph: fx.Graph) -> None:
    """Casts and expands what is copied into tensors of another dtype or shape: torch 2.9 and 2.13
    forget it there, and a buffer would become what it is given.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        copied = arguments_of(node)[1]
        to, value = (v.meta.get("val") for v in arguments_of(node)[:2])
        if not isinstance(to, torch.Tensor):
            continue
        with graph.inserting_before(node):
            if value.dtype != to.dtype:
                copied = graph.call_function(_aten.to.dtype, (copied, to.dtype))
                value = value.to(to.dtype)
                copied.meta = {**origin_of(node, "custom"), "val": value}
            if value.shape != to.shape:
                copied = graph.call_function(_aten.expand.default, (copied, to.shape))
                copied.meta = {**origin_of(node, "custom"), "val": value.expand(to.shape)}
        node.update_arg(1, copied)


def _replace_undecided(module: fx.GraphModule) -> bool:
    """Replaces operators that may share memory, or write to it; False if that takes more."""
    if not _is_plain(module):
        return False
    _open_regions(module)
    graph = module.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    written = [n for n in calls if _is_mutable(n)]
    undecided = [n for n in calls if _is_undecided(n.target)]
    made: dict[Any, fx.Graph] = {}
    found = [(node, _made_of(node, made)) for node in undecided]
    if any(has_writes(parts) or _writes_inputs(parts) for _, parts in found):
        return False
    for node in written:  # what comes later uses its result, not what it has detached
        node.target = _aten.detach.default
        if input_of(node).target is _aten.lift_fresh_copy.default:  # a constant
            node.replace_all_uses_with(input_of(node))
    for node, parts in found:
        _replace(graph, node, parts)
    graph.eliminate_dead_code()
    return True


def _replace(graph: fx.Graph, node: fx.Node, parts: fx.Graph) -> None:
    inputs = zip(parts.find_nodes(op="placeholder"), node.all_input_nodes, strict=True)
    copies = dict[fx.Node, fx.Node](inputs)
    with graph.inserting_before(node):
        result, *_ = cast(list[Any], graph.graph_copy(parts, copies))
    origin = origin_of(node, "custom")
    for part, copy in copies.items():
        if part.op == "call_function":
            copy.meta = {**origin, "val": part.meta["val"]}
    _replace_by(graph, node, result)


def _replace_by(graph: fx.Graph, node: fx.Node, result: Any) -> None:
    """Lets users of a node have another one, or one of several results."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[arguments_of(user)[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def _is_plain(module: fx.GraphModule) -> bool:
    """Whether a program has no writes, no regions with casts, and tensors of sizes it knows."""
    return all(_is_plain_node(module, node) for node in module.graph.nodes)


def _is_plain_node(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "output":
        return True
    if node.op == "get_attr":
        body = getattr(module, str(node.target), None)
        return isinstance(body, fx.GraphModule) and _is_plain(body)
    is_call = isinstance(node.target, OpOverload) or node.target is operator.getitem
    if not (is_call or node.op == "placeholder" or _body_place(node) is not None):
        return False
    if is_call and _is_mutable(node) and node.target is not _aten.detach_.default:
        return False
    tensors = [v for v in pytree.tree_leaves(node.meta.get("val")) if v is not None]
    return all(
        isinstance(v, torch.Tensor)
        and v.layout is torch.strided
        and not (v._has_symbolic_sizes_strides or v.is_conj() or v.is_neg())
        for v in tensors
    )


def _is_mutable(node: fx.Node) -> bool:
    return node.target is not operator.getitem and schema_of(node).is_mutable


def _body_place(node: fx.Node) -> int | None:
    """Where a region without casts has its body among its arguments; its inputs come after it."""
    if isinstance(node.target, WrapWithSetGradEnabled):
        return 1
    if isinstance(node.target, WrapWithAutocast) and arguments_of(node)[2] is False:
        return 4
    return None


def _open_regions(module: fx.GraphModule) -> None:
    """Replaces regions by what is in them; `keep_gradient_barriers` tells of their gradients."""
    graph = module.graph
    for node in list(graph.nodes):
        place = _body_place(node)
        if place is None:
            continue
        body_name, *inputs = arguments_of(node)[place:]
        body = cast(fx.GraphModule, getattr(module, str(body_name.target)))
        _open_regions(body)
        copies = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
        with graph.inserting_before(node):
            _replace_by(graph, node, graph.graph_copy(body.graph, copies))
        graph.erase_node(body_name)


def _is_undecided(target: Any) -> bool:
    if target is operator.getitem or _is_preservable_cia_op(target):
        return False
    return target is _aten.lift_fresh_copy.default or target._can_decompose()


def _made_of(node: fx.Node, made: dict[Any, fx.Graph]) -> fx.Graph:
    """What a node does as a functional graph of its tensors, with the new values of those."""
    inputs = node.all_input_nodes
    values = [n.meta["val"] for n in inputs]
    places = {n: i for i, n in enumerate(inputs)}
    arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{places[n]}")
    kinds = [(v.shape, v.dtype) for v in values]
    key = node.target, repr((arguments, kinds, layouts(values)))
    if key not in made:

        def run(*values: torch.Tensor) -> list[Any]:
            return [result_of(node, dict(zip(inputs, values, strict=True))), *values]

        # By torch's Python decompositions, as elsewhere: a dropout is one operator, not three.
        with torch.no_grad(), enable_python_dispatcher():
            made[key] = make_fx(dispatch_functionalize(run))(*values).graph
    return made[key]


def _writes_inputs(graph: fx.Graph) -> bool:
    """Whether arguments have other values afterwards (those of a batch norm's statistics)."""
    return outputs_of(graph)[1:] != graph.find_nodes(op="placeholder")


def _read_tied_once(program: torch.export.ExportedProgram) -> None:
    """Lets tied parameters and shared buffers be read by their first names, where a program writes.

    In place. Torch refuses a tensor that is an input twice and written to, such as the statistics
    of a norm that two modules hold; what is read by no other name may be another tensor there.
    """
    parts = [m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    if not any(has_writes(part.graph) for part in parts):
        return
    state, others = program.state_dict, program.constants  # buffers of no state dict
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    first: dict[int, fx.Node] = {}
    for spec in program.graph_signature.input_specs:
        name = spec.target or ""
        values: dict[str, Any] = state if name in state else others
        node, value = placeholders.get(getattr(spec.arg, "name", "")), values.get(name)
        if not isinstance(value, torch.Tensor) or node is None:
            continue
        known = first.setdefault(id(value), node)
        if known is not node:
            node.replace_all_uses_with(known)
            other = value.detach().clone()
            is_parameter = isinstance(value, nn.Parameter)
            values[name] = nn.Parameter(other, value.requires_grad) if is_parameter else other


def _composites(module: fx.GraphModule) -> set[OpOverload]:
    """Composite operators of a program and of the programs in it."""
    return {operator for operator in _operators(module) if _is_preservable_cia_op(operator)}


def _operators(module: fx.GraphModule) -> set[OpOverload]:
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    targets = {node.target for graph in graphs for node in graph.nodes}
    return {target for target in targets if isinstance(target, OpOverload)}


@contextlib.contextmanager
def _derivatives_kept(module: fx.GraphModule) -> Generator[None]:
    """Users' operators that have a kernel for autograd stay operators, which it differentiates.

    Torch would run that kernel, and have what it computes in the operator's place, without the
    backwards of the `autograd.Function`s that it applies.
    """
    own = [t for t in _operators(module) if t.namespace != "aten" and _has_derivative(t)]
    with contextlib.ExitStack() as stack:
        for operator in own:
            below = autograd_not_implemented(operator, deferred_error=True)
            kernels = operator.py_kernels | {DispatchKey.AutogradCPU: below}
            # With a cache of its own, since torch's knows the other kernel.
            stack.enter_context(exchanged(operator, py_kernels=kernels, _dispatch_cache={}))
        yield


def _has_derivative(target: OpOverload) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore[reportPrivateUsage]
    return any(has_kernel(target.name(), key) for key in ("AutogradCPU", "Autograd"))


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
