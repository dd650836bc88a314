"""What each node of a step costs, and the step graph in the partitioner's words.

Operations are counted by torch's own flop formulas, for what an operator consists of if there is
none for it; time is the larger of arithmetic and memory traffic on a `MachineModel`. An operator
with several results and the nodes that pick them are one unit of placement.
"""

import math
import operator
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from mpxla.graph.later_values import LATER, reads_of
from mpxla.graph.partition.words import GraphNode, NodeCost, NodeKind, SavedTensor
from mpxla.graph.shapes import static_shapes
from mpxla.graph.stepgraph import (
    InputKind,
    InputRole,
    OutputKind,
    StepGraph,
    is_random,
    module_path,
)
from mpxla.stage.spec import key_of_call

__all__ = ["MachineModel", "PartitionProblem", "build_problem"]

_BACKWARD_FACTOR = 2.0
"""What operators without a formula read and write, in units of their forward."""
_ATTENTION_BACKWARD_FACTOR = 2.5
"""Five products for the two of the forward (torch's formula for the flash kernel's backward)."""
_STATE_FACTOR = 4
"""Weight, gradient and two moments of Adam, in units of the weight."""
_NARROW_STATE_FACTOR = 9
"""The same for a weight of 2 bytes: a master of 4, and gradient and moments of 4 each."""
_NARROW_STATE_FACTOR_ALONE = 5
"""Without a master: a weight and moments of 2 bytes, and a gradient that is summed in 4."""


_NARROW = (torch.bfloat16, torch.float16)

_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten.detach.default, _aten.alias.default)


@dataclass(frozen=True)
class MachineModel:
    """Rates that turn counts into seconds. The defaults describe one core of a server CPU."""

    flops_per_s: float = 8e10
    narrow_flops_per_s: float | None = None
    """Of products with 16-bit results; None: as of all others."""
    memory_bytes_per_s: float = 1e10
    link_bytes_per_s: float = 1e9
    """Between two ranks, copies on both sides included."""
    host_bytes_per_s: float = 5e9
    """Between the memories of a device and its host. No plan depends on it, only pictures."""
    task_s: float = 2e-6
    """Fixed cost of a node."""

    def flops_of(self, dtype: torch.dtype) -> float:
        """Operations per second of products with results of this type."""
        return (dtype in _NARROW and self.narrow_flops_per_s) or self.flops_per_s


@dataclass(frozen=True)
class PartitionProblem:
    """The partitioner's input, and the way back from its nodes to the graph's.

    Attributes:
        nodes: units of placement, in program order.
        parameter_bytes: weights, gradients and optimizer state of every parameter; of frozen ones
            the weights alone.
        members: nodes of the step graph that each unit stands for.
        flops: forward floating-point operations of each unit.
        total_flops: with those of its derivatives.
        forward_s: the forward's part of each unit's `compute_s`.
        weight_bytes: the weights of every parameter alone.
    """

    nodes: tuple[GraphNode, ...]
    parameter_bytes: Mapping[str, int]
    members: tuple[tuple[fx.Node, ...], ...]
    flops: tuple[int, ...]
    total_flops: tuple[int, ...]
    forward_s: tuple[float, ...]
    weight_bytes: Mapping[str, int] = field(default_factory=dict)


def build_problem(
    step: StepGraph,
    machine: MachineModel,
    stateful: frozenset[str] = frozenset(),
    measured_s: Mapping[str, float] | None = None,
    saved: Mapping[str, Collection[SavedTensor]] | None = None,
    has_masters: bool = True,
) -> PartitionProblem:
    """Describes a step to the partitioner.

    Args:
        step: the captured step.
        machine: rates of the target.
        stateful: buffers that some step changes, so that they stay where they are, as parameters
            do; other buffers can be held by several ranks.
        measured_s: seconds of the forward of nodes by name, where they were measured; they take
            the place of estimates.
        saved: what the derivatives of nodes read, by the names of the nodes.
        has_masters: whether 16-bit parameters are updated in float32.
    """
    flops = _flops_of(step)
    total_flops = {n: count + int(count * _derivatives(n)) for n, count in flops.items()}
    times = _Times(flops, machine, measured_s or {})
    roles = step.roles
    owned = {
        role.name
        for role in step.inputs
        if role.kind is InputKind.PARAMETER or role.name in stateful
    }
    new_buffers = {n: role.name for n, role in step.ends if role.kind is OutputKind.BUFFER}
    later = step.graph.find_nodes(op="call_function", target=LATER)
    copies = _copies_for(new_buffers)
    stuck = {*copies, *(read for node in later for read in reads_of(node))}
    units: dict[fx.Node, int] = {}
    members: list[list[fx.Node]] = []
    for node in step.graph.nodes:
        if node.op == "output" or (node in roles and roles[node].kind is not InputKind.STEP_INPUT):
            continue
        if (node.target is operator.getitem or node in copies) and node.args[0] in units:
            units[node] = units[node.args[0]]
            members[units[node]].append(node)
        else:
            units[node] = len(members)
            members.append([node])
    seconds = [times.of(group) for group in members]
    nodes = tuple(
        _unit(group, units, roles, owned, new_buffers, unit_s, saved or {}, stuck)
        for group, unit_s in zip(members, seconds, strict=True)
    )
    held = {role.name: node for node, role in roles.items() if role.name in owned}
    weight_bytes = {name: _num_bytes(node) for name, node in held.items()}
    parameter_bytes = {
        name: weight_bytes[name] * _state_factor(node.meta["val"], has_masters)
        for name, node in held.items()
    }
    return PartitionProblem(
        nodes,
        parameter_bytes,
        tuple(tuple(group) for group in members),
        tuple(sum(flops.get(n, 0) for n in group) for group in members),
        tuple(sum(total_flops.get(n, 0) for n in group) for group in members),
        tuple(forward_s for forward_s, _ in seconds),
        weight_bytes,
    )


def _copies_for(new_buffers: Collection[fx.Node]) -> set[fx.Node]:
    """Copies of values that only go to buffers: they stay with what computes the values.

    At the end of the graph, where capture puts them, they would be on the last stage, and the
    buffer, which other steps may read where the value is computed, with them.
    """
    found: set[fx.Node] = set()
    for node in new_buffers:
        while node.target in _COPIES and len(node.users) == 1:
            source = node.all_input_nodes[0]
            if source.op != "placeholder":  # inputs are there for all stages
                found.add(node)
            node = source
    return found


def _unit(
    group: list[fx.Node],
    units: Mapping[fx.Node, int],
    roles: Mapping[fx.Node, InputRole],
    owned: set[str],
    new_buffers: Mapping[fx.Node, str],
    unit_s: tuple[float, float],
    saved: Mapping[str, Collection[SavedTensor]],
    stuck: Collection[fx.Node],
) -> GraphNode:
    head, sources = group[0], group[0].all_input_nodes
    held = [roles[s] for s in sources if s not in units]
    mutates = tuple(new_buffers[n] for n in group if n in new_buffers)
    used = [*(role.name for role in held), *mutates]
    values = [n for n in group if isinstance(n.meta["val"], torch.Tensor)]
    output_bytes = sum(_num_bytes(n) for n in values if n not in stuck)
    needs_grad = any(n.meta["val"].requires_grad for n in values)
    forward_s, backward_s = unit_s
    kind = NodeKind.RANDOM if is_random(head) else NodeKind.COMPUTE
    return GraphNode(
        name=head.name,
        inputs=tuple(dict.fromkeys(units[s] for s in sources if s in units)),
        parameters=tuple(dict.fromkeys(name for name in used if name in owned)),
        buffers=tuple(dict.fromkeys(r.name for r in held if r.name not in owned)),
        mutates=mutates,
        module_path=module_path(head),
        kind=NodeKind.INPUT if head in roles else kind,
        cost=NodeCost(
            compute_s=forward_s + (backward_s if needs_grad else 0.0),
            output_bytes=output_bytes,
            gradient_bytes=output_bytes if needs_grad else 0,
        ),
        saved=tuple(dict.fromkeys(tensor for n in group for tensor in saved.get(n.name, ()))),
    )


@dataclass(frozen=True)
class _Times:
    """Seconds of units, estimated or measured."""

    flops: Mapping[fx.Node, int]
    machine: MachineModel
    measured_s: Mapping[str, float]

    def of(self, group: list[fx.Node]) -> tuple[float, float]:
        """Of a unit's forward, and of its derivatives; nothing for inputs and views."""
        if group[0].op == "placeholder" or _is_free(group[0]):
            return 0.0, 0.0
        work_s = self._work_s(group)
        counted = [_derivatives(n) for n in group if n in self.flops]
        return self.machine.task_s + work_s, max(counted, default=_BACKWARD_FACTOR) * work_s

    def _work_s(self, group: list[fx.Node]) -> float:
        """The larger of arithmetic and memory traffic, or what was measured."""
        head = group[0]
        if head.name in self.measured_s:
            return self.measured_s[head.name]
        values = [n for n in group if isinstance(n.meta["val"], torch.Tensor)]
        moved_bytes = sum(_num_bytes(n) for n in (*head.all_input_nodes, *values))
        operations = sum(self.flops.get(n, 0) for n in group)
        arithmetic_s = 0.0
        if operations:  # the first value is the product; attention gives sums in float32, too
            arithmetic_s = operations / self.machine.flops_of(values[0].meta["val"].dtype)
        return max(arithmetic_s, moved_bytes / self.machine.memory_bytes_per_s)


def _state_factor(parameter: torch.Tensor, has_masters: bool) -> int:
    """What is held of a parameter, in units of it."""
    if not parameter.requires_grad:
        return 1
    if parameter.dtype not in _NARROW:
        return _STATE_FACTOR
    return _NARROW_STATE_FACTOR if has_masters else _NARROW_STATE_FACTOR_ALONE


def _derivatives(node: fx.Node) -> float:
    """How often the backward of an operator that torch counts does the work of its forward."""
    operands = [n.meta["val"] for n in node.all_input_nodes]
    matrices = [v for v in operands if isinstance(v, torch.Tensor) and v.dim() >= 2]
    if "attention" in str(node.target):
        return _ATTENTION_BACKWARD_FACTOR if any(v.requires_grad for v in matrices) else 0.0
    return float(sum(v.requires_grad for v in matrices))


def _is_free(node: fx.Node) -> bool:
    """Whether the node only renames memory."""
    return bool(getattr(node.target, "is_view", False)) or node.target is operator.getitem


def _num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else (value,)
    return sum(v.numel() * v.itemsize for v in values if isinstance(v, torch.Tensor))


def _flops_of(step: StepGraph) -> dict[fx.Node, int]:
    """Forward operations of every node.

    Schedules are chosen by cutting the same step again and again, and to count takes longer than
    to cut: counts are kept for as long as the graph is there, and has as many nodes.
    """
    size, named = _counted.get(step.graph, (0, {}))
    if size != len(step.graph.nodes):
        named = {node.name: count for node, count in _count_flops(step).items()}
        _counted[step.graph] = len(step.graph.nodes), named
    return {node: named[node.name] for node in step.graph.nodes if node.name in named}


_counted: weakref.WeakKeyDictionary[fx.Graph, tuple[int, Mapping[str, int]]]
_counted = weakref.WeakKeyDictionary()  # by name: a node would keep its graph


def _count_flops(step: StepGraph) -> dict[fx.Node, int]:
    """The same: equal nodes once, and only those that a formula may know."""
    counts: dict[Any, int] = {}
    found: dict[fx.Node, int] = {}
    for node in step.graph.nodes:
        if node.op != "call_function" or not _may_count(node.target):
            continue
        key = key_of_call(node)
        if key not in counts:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            packet = getattr(node.target, "overloadpacket", None)
            formula = _FORMULAS.get(packet) or flop_registry.get(packet)
            if formula is None:
                counts[key] = _flops_of_parts(node.target, args, kwargs)
            else:
                counts[key] = formula(*args, **kwargs, out_val=node.meta["val"])
        if counts[key]:
            found[node] = counts[key]
    return found


def _attention_flops(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, out_val: Any, **__: Any
) -> int:
    """Scores and values that they weigh; scores that a mask takes away are computed as well."""
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * scores * (query.shape[-1] + value.shape[-1])


_FORMULAS: dict[Any, Any] = {
    torch.ops.aten.linear: lambda rows, weight, *_, out_val: 2 * rows.numel() * weight.shape[0],
    # Its parts depend on the device, and torch has no formula for those of the CPU (2.9).
    torch.ops.aten.scaled_dot_product_attention: _attention_flops,
}
_WITHOUT_PRODUCTS = {
    getattr(torch.ops.aten, name)
    for name in (
        *("reshape", "flatten", "contiguous", "to", "chunk", "split", "dropout", "embedding"),
        *("layer_norm", "rms_norm", "group_norm", "batch_norm", "cross_entropy_loss"),
    )
}
"""Frequent ones that need not be taken apart to see that no formula knows a part."""


def _flops_of_parts(target: object, args: Any, kwargs: Any) -> int:
    """Operations of an operator that torch takes apart before it looks for formulas."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), static_shapes():
        args, kwargs = pytree.tree_map_only(torch.Tensor, _stand_in, (args, kwargs))
        with FlopCounterMode(display=False) as counter:
            cast(Any, target)(*args, **kwargs)
    return counter.get_total_flops()


def _may_count(target: object) -> bool:
    """Whether torch has a formula for an operator, or takes it apart before it looks for one."""
    if not isinstance(target, OpOverload):
        return target is not operator.getitem
    if target.overloadpacket in _WITHOUT_PRODUCTS:
        return False
    key = DispatchKey.CompositeImplicitAutograd
    is_composite = key in target.py_kernels or target.has_kernel_for_dispatch_key(key)
    return is_composite or target.overloadpacket in flop_registry


def _stand_in(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
