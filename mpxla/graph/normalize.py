"""Small rewrites that make an exported graph fit for cutting into stages.

`check_operators` looks at an exported graph, and `normalize` at one whose shapes are fixed: once at
each node, with a function of one purpose for each operator. They must not know about stages.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from mpxla.errors import CaptureError
from mpxla.graph.fakes import storage_of
from mpxla.graph.stepgraph import module_path
from mpxla.graph.typed import arguments_of, input_of, origin_of
from mpxla.graph.user_code import line_of

__all__ = [
    "COLLECTIVES_OUTSIDE",
    "check_operators",
    "drop_replayed_views",
    "free_layouts",
    "has_writes",
    "keep_gradient_barriers",
    "normalize",
]

_aten = torch.ops.aten
_CHECKS = (
    _aten._assert_tensor_metadata.default,
    _aten._assert_scalar.default,
    _aten._assert_async.msg,
    _aten.sym_constrain_range_for_size.default,
    _aten.sym_constrain_range.default,
)
COLLECTIVES_OUTSIDE = (
    "A step runs once per microbatch, on ranks that hold parts of the model: return the value, and "
    "call the collective on the result. Gradients are averaged over replicas without it."
)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def drop_replayed_views(program: ExportedProgram) -> None:
    """Takes views out of a traced program that autograd has made of tensors which are not in it.

    In place. Where the result of an operator is a view inside (of `linear` with three dimensions,
    or what `vmap` turns), and something writes to a part of it, autograd makes that view again, for
    its derivative only. Its base was never traced, so export takes it for a constant.
    """
    specs, constants = program.graph_signature.input_specs, program.constants
    lost = {s.arg.name: s for s in specs if isinstance(constants.get(s.target or ""), FakeTensor)}
    for base in program.graph.find_nodes(op="placeholder") if lost else ():
        if base.name in lost and _drop_unused(base):
            specs.remove(lost[base.name])
            del constants[str(lost[base.name].target)]
    if lost:
        program.graph_module.recompile()


def _drop_unused(base: fx.Node) -> bool:
    """Erases what is made of an input and is used for nothing; and the input, if that was all."""
    made: dict[fx.Node, fx.GraphModule | None] = {base: None}
    for node in base.graph.nodes:  # each comes after what it uses
        if any(made.get(source, base) is None for source in node.all_input_nodes):
            made[node] = _body_of(node)
    for node, body in reversed(made.items()):
        if body is None:
            if not node.users and (node is base or not node.is_impure()):
                node.graph.erase_node(node)
            continue
        for source in node.all_input_nodes:
            if source in made and node.args.count(source) == 1:
                place, inputs = node.args.index(source), body.graph.find_nodes(op="placeholder")
                if _drop_unused(inputs[place - len(node.args)]):  # its inputs come last
                    node.args = (*node.args[:place], *node.args[place + 1 :])
                    body.recompile()
    return base not in base.graph.nodes


def _body_of(node: fx.Node) -> fx.GraphModule | None:
    """The program of a region under `torch.no_grad()` or `torch.autocast`."""
    if str(node.target) not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
        return None
    names = (a for a in arguments_of(node) if isinstance(a, fx.Node) and a.op == "get_attr")
    return getattr(node.graph.owning_module, str(next(names).target))


def keep_gradient_barriers(module: fx.GraphModule) -> None:
    """Makes regions under `torch.no_grad()` detach their results, in autocast regions too.

    Functionalization inlines such regions. A region without gradients would lose that meaning, so
    its outputs get an explicit `detach`.
    """
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    _detach_regions(module, any(has_writes(graph) for graph in graphs))


def _detach_regions(module: fx.GraphModule, are_written: bool) -> None:
    for node in list(module.graph.nodes):
        body = _body_of(node)
        if body is not None:
            _detach_regions(body, are_written)
            is_gradless = str(node.target) == "wrap_with_set_grad_enabled"
            if is_gradless and arguments_of(node)[0] is False:
                _detach_outputs(body, are_written)


def _detach_outputs(body: fx.GraphModule, are_written: bool) -> None:
    graph = body.graph
    output = graph.output_node()
    memories = Counter(
        storage_of(value)
        for node in (*graph.find_nodes(op="placeholder"), *output.all_input_nodes)
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    )

    def detach(value: fx.Node) -> fx.Node:
        fake = value.meta.get("val")
        if not isinstance(fake, torch.Tensor):
            return value
        with graph.inserting_before(output):
            node = graph.call_function(_aten.detach.default, (value,))
            node.meta = dict(value.meta)
            if are_written and memories[storage_of(fake)] == 1:
                # What is written to it later has a gradient, which a view by `detach` would lose.
                node = graph.call_function(_aten.clone.default, (node,))
                node.meta = dict(value.meta)
        return node

    output.args = fx.map_arg(output.args, detach)
    body.recompile()


def has_writes(graph: fx.Graph) -> bool:
    """Whether an operator changes a tensor in place."""
    schemas = (getattr(node.target, "_schema", None) for node in graph.nodes)
    return any(schema is not None and schema.is_mutable for schema in schemas)


def check_operators(graph: fx.Graph) -> None:
    """Removes assertions about metadata, which hold by construction and cannot run on XLA.

    Raises:
        CaptureError: a collective of torch_xla, which would mean the processes of one program only;
            or an instance norm that updates running statistics: export does not see that it does.
            Names the operator and its module.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _CHECKS and not node.users:
            graph.erase_node(node)
        elif getattr(node.target, "namespace", "") in _COLLECTIVES:
            raise CaptureError(
                f"{_place(node)} is a collective inside a step function. {COLLECTIVES_OUTSIDE}"
            )
        elif node.target is _aten.instance_norm.default:
            running_mean, uses_own_statistics = node.args[3], node.args[5]
            if running_mean is not None and uses_own_statistics:
                raise CaptureError(
                    f"{_place(node)} updates running statistics, which a captured step would lose. "
                    f"Set track_running_stats=False, which is the default, or call eval() on the "
                    f"layer."
                )


def normalize(graph: fx.Graph) -> None:
    """Rewrites operators.

    Raises:
        CaptureError: one cannot be; names the user's line.
    """
    for node in list(graph.nodes):
        rule = _RULES.get(node.target)
        if rule is not None:
            with graph.inserting_before(node):
                rule(node)


def _resolve_number(node: fx.Node) -> None:
    """Replaces a returned `x.item()` by `x`; the runtime turns it into a Python number.

    Raises:
        CaptureError: the number takes part in further computation.
    """
    others = [user for user in node.users if user.op != "output"]
    if others:
        places = sorted({_place(user) for user in others})
        raise CaptureError(
            f"The Python number read by .item() is used in a computation inside the step "
            f"function, by {', '.join(places)}. Keep it a tensor there; only a number that "
            f"is returned may be read by .item()."
        )
    source = input_of(node)
    is_detached = source.target is _aten.detach.default
    _replace(node, source if is_detached else _call(node, _aten.detach.default, source))


def _replace(node: fx.Node, value: fx.Node) -> None:
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _call(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A new node from the same line as another one."""
    made = node.graph.call_function(target, args)
    made.meta = origin_of(node)
    return made


def _place(node: fx.Node) -> str:
    """The operator, the module that runs it if one does, and the user's line."""
    name = str(node.target).removesuffix(".default").removesuffix(".Tensor")
    return f"{name} in {module_path(node) or 'the step function'}{line_of(node)}"


def _collapse_detach(node: fx.Node) -> None:
    """Merges chains of `detach` (tracing leaves three for one) and drops `alias`."""
    source = input_of(node)
    if node.target is _aten.alias.default or source.target is _aten.detach.default:
        _replace(node, source)


def _densify_gradient(node: fx.Node) -> None:
    """Makes an embedding with `sparse=True` an ordinary one: the device has no sparse tensors."""
    node.args = node.args[:4]
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != "sparse"}


def _give_index_a_dim(node: fx.Node) -> None:
    """`table[[i]]` in place of `index_select` and the like with an index without dims.

    To PyTorch they are the same. Its decompositions, which backends use, know only the first.
    Nodes without a value are of `fix_sizes`, whose indices have a dim.
    """
    index = cast(fx.Node, node.args[2])
    if "val" in index.meta and not index.meta["val"].dim():
        node.update_arg(2, _call(node, _aten.reshape.default, index, [1]))


def _flatten_strided(node: fx.Node) -> None:
    """`as_strided` reads and writes a flat tensor, in the order in which its argument lay.

    Its strides are those of the capture, and a value that comes from another stage or program may
    lie in memory in another order: the view would be of other elements, in silence.

    Raises:
        CaptureError: the argument has gaps, elements in one place, or not all that is read.
    """
    num_tensors = 1 if node.target is _aten.as_strided.default else 2
    source, *others = arguments_of(node)[:num_tensors]
    size, stride, *offset = arguments_of(node)[num_tensors:]
    value = source.meta["val"]
    order = _order_in_memory(value)
    if offset and offset[0] is not None:
        offset = [offset[0] - value.storage_offset()]
    first = offset[0] or 0 if offset else 0
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if order is None or not 0 <= first <= last < value.numel():
        raise CaptureError(
            f"{_place(node)} takes strides of a tensor that is a part of another one, or "
            f"expanded: call contiguous() before it."
        )
    moved = _call(node, _aten.permute.default, source, order)
    flat = _call(node, _aten.reshape.default, moved, [-1])
    node.args = (flat, *others, size, stride, *offset)
    if others:
        shape = [value.shape[dim] for dim in order]
        back = [order.index(dim) for dim in range(value.dim())]
        with node.graph.inserting_before(node.next):
            laid = _call(node, _aten.reshape.default, node, shape)
            whole = _call(node, _aten.permute.default, laid, back)
        whole.meta["val"] = node.meta["val"]  # for strides of what has been written to
        node.replace_all_uses_with(whole, lambda user: user is not laid)


def _order_in_memory(value: torch.Tensor) -> list[int] | None:
    """Dims from the outermost to the innermost; None if a tensor has gaps or overlaps."""
    order = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), value.shape[dim] == 1))
    step = 1
    for dim in reversed(order):
        if value.shape[dim] != 1 and value.stride(dim) != step:
            return None
        step *= value.shape[dim]
    return order


def _split_complex_write(node: fx.Node) -> None:
    """A write to a part of a complex tensor becomes one of real numbers.

    torch differentiates `spectrum[..., :modes] = ...`, but not the operator that stands for it in a
    functional graph.
    """
    value = node.meta.get("val")
    if value is None or not value.is_complex():
        return
    tensors = [_call(node, _aten.resolve_conj.default, n) for n in node.args[:2]]
    pairs = [_call(node, _aten.view_as_real.default, n) for n in tensors]
    dim, *place = arguments_of(node)[2:] or (0,)
    node.args = (*pairs, dim % value.dim(), *place)
    with node.graph.inserting_after(node):
        whole = _call(node, _aten.view_as_complex.default, node)
    node.replace_all_uses_with(whole, lambda user: user is not whole)


def free_layouts(graph: fx.Graph) -> None:
    """Turns views into reshapes: on the device, operators may lay out their results otherwise."""
    for node in graph.find_nodes(op="call_function", target=_aten.view.default):
        _free_layout(node)


def _free_layout(node: fx.Node) -> None:
    node.target = _aten.reshape.default


_RULES: Mapping[Any, Callable[[fx.Node], None]] = {
    **dict.fromkeys((_aten.item.default, _aten._local_scalar_dense.default), _resolve_number),
    **dict.fromkeys((_aten.detach.default, _aten.alias.default), _collapse_detach),
    **dict.fromkeys((_aten.index_select.default, _aten.index_add.default), _give_index_a_dim),
    **dict.fromkeys((_aten.index_fill.int_Scalar, _aten.index_fill.int_Tensor), _give_index_a_dim),
    **dict.fromkeys((_aten.as_strided.default, _aten.as_strided_scatter.default), _flatten_strided),
    **dict.fromkeys(
        (_aten.slice_scatter.default, _aten.select_scatter.default), _split_complex_write
    ),
    _aten.embedding.default: _densify_gradient,
    _aten.index_copy.default: _give_index_a_dim,
    _aten.view.default: _free_layout,
}
