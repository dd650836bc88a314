"""A captured step as plain data: one graph, with the role of every placeholder and output.

Everything after capture (costs, partition, split, lowering) works on a `StepGraph`; nothing here
knows how it was captured or how it will be cut.
"""

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from mpxla.graph.python.decisions import Decisions
from mpxla.graph.python.recorded import Recorded
from mpxla.graph.python.rewritten import rewritten_paths
from mpxla.graph.typed import named_arguments, outputs_of
from mpxla.graph.user_code import line_of

__all__ = [
    "CASTS",
    "VIEWS",
    "Check",
    "InputKind",
    "InputRole",
    "LeftFlag",
    "OutputKind",
    "OutputRole",
    "Print",
    "StepGraph",
    "describe",
    "is_random",
    "may_draw",
    "module_path",
    "place",
    "with_ends",
    "without_inputs",
]


_aten = torch.ops.aten
VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
"""Operators that give the same elements in another shape."""
CASTS = (
    *(_aten.to.dtype, _aten._to_copy.default, _aten.clone.default, _aten.alias.default),
    *(_aten.contiguous.default, _aten.to.dtype_layout),
)
"""Operators that give the same elements in the same shape, with their gradients."""


class InputKind(enum.Enum):
    """What a placeholder of the graph stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    STEP_INPUT = "step input"


@dataclass(frozen=True)
class InputRole:
    """Role of one placeholder.

    `name` is the canonical parameter or buffer name inside the user's model, the constant's name,
    or empty for a step input, whose `index` counts the tensor leaves of the call.
    """

    kind: InputKind
    name: str = ""
    index: int = -1


class OutputKind(enum.Enum):
    """What an output of the graph is for."""

    BUFFER = "buffer"
    """New value of a buffer or parameter that the step changes."""
    OBJECTIVE = "objective"
    """A scalar that the step differentiates (one per `model.backward` call and tensor)."""
    RESULT = "result"
    """A tensor that the step returns."""


@dataclass(frozen=True)
class OutputRole:
    """Role of one output: the `name` of what is changed, or the `index` of a result or objective.

    A result with a name is what rows of a parameter have been scaled by (`graph/renorms.py`).
    """

    kind: OutputKind
    name: str = ""
    index: int = -1

    def is_among(self, results: Collection[int]) -> bool:
        """Whether it is one of some results, by their indices."""
        return self.kind is OutputKind.RESULT and not self.name and self.index in results


@dataclass(frozen=True)
class ResultLeaf:
    """One leaf of the value that the step function returns.

    Exactly one of: a tensor (`output` is its index among the results), a Python number read by
    `.item()` (same, with `is_number`), what Python makes of numbers and tensors when the step has
    run (`is_number`, and `value` says how), or any other object (`output` is None, `value` holds
    it).
    """

    output: int | None
    is_number: bool = False
    value: Any = None


@dataclass(frozen=True)
class LeftFlag:
    """What a step leaves as `requires_grad` of a parameter.

    Attributes:
        value: the flag.
        is_other: whether it was another one when the step began.
        is_early: whether the step sets it before it goes by the one that it finds.
    """

    value: bool
    is_other: bool
    is_early: bool


class Check(enum.Enum):
    """What a step supposes of values, and fails where it is not so."""

    FINITE = "finite"
    """No value is NaN or infinite."""
    ROWS = "rows"
    """A mask is true somewhere."""
    NO_ROWS = "no rows"
    """A mask is true nowhere, or everywhere, where the function raises an exception if not."""
    JOINED = "joined"
    """Slices that are joined have all rows."""
    COUNTED = "counted"
    """`torch.bincount` has a place for every value."""


@dataclass(frozen=True)
class Print:
    """A tensor that the step shows when it runs: its label, and its index among the results.

    Or a check, whose label is the user's line.
    """

    label: str
    result: int
    check: Check | None = None


@dataclass(frozen=True)
class StepGraph:
    """A functional ATen graph of model, loss and user code for one microbatch.

    Attributes:
        graph: functional graph; every node's `meta["val"]` is a fake CPU tensor whose
            `requires_grad` tells whether gradients flow through it.
        inputs: role of every placeholder, in graph order.
        outputs: role of every element of the output node, in order.
        result_leaves: leaves of the returned structure, in order.
        result_spec: pytree structure of the returned value.
        constants: values of the CONSTANT placeholders: the user's own tensors, which may change.
        is_training: whether the step calls `model.backward`.
        decisions: what Python has read of the inputs; None if it was nothing.
        recorded: numbers of the model that the step leaves in Python.
        numbers: indices of the results that these are computed of, after what the step returns.
        prints: results that are for `smp.debug_print`, after all others.
        reads: the user's own tensors whose values Python has read, with the user's lines.
        modules: those that the step uses and no distributed model holds.
        looking: parameters with hooks that are called with the gradient when the step has run.
        accumulated: those with hooks that are called with the parameter then.
        asked: the user's lines that ask for values which depend on the model (`python/answers.py`).
        gone: attributes of modules that had tensors of the step, and have them no more.
        is_question: whether the step computes what they ask for, and not what comes after it.
        flags: what the step sets as `requires_grad` of parameters.
    """

    graph: fx.Graph
    inputs: tuple[InputRole, ...]
    outputs: tuple[OutputRole, ...]
    result_leaves: tuple[ResultLeaf, ...]
    result_spec: Any
    constants: Mapping[str, torch.Tensor]
    is_training: bool
    decisions: Decisions | None = None
    recorded: tuple[Recorded, ...] = ()
    numbers: tuple[int, ...] = ()
    prints: tuple[Print, ...] = ()
    reads: tuple[tuple[torch.Tensor, str], ...] = ()
    modules: tuple[nn.Module, ...] = ()
    looking: tuple[tuple[str, Callable[[torch.Tensor], Any]], ...] = ()
    accumulated: tuple[tuple[str, Callable[[torch.Tensor], Any]], ...] = ()
    asked: tuple[str, ...] = ()
    gone: tuple[tuple[nn.Module, str], ...] = ()
    is_question: bool = False
    flags: Mapping[str, LeftFlag] = field(default_factory=dict)

    def names_in_use(self) -> set[str]:
        """Parameters and buffers that some node reads or that the step changes."""
        held = (InputKind.PARAMETER, InputKind.BUFFER)
        used = {role.name for n, role in self.roles.items() if n.users and role.kind in held}
        return used | self.changed

    @property
    def changed(self) -> set[str]:
        """Buffers and parameters that get new values."""
        return {role.name for role in self.outputs if role.kind is OutputKind.BUFFER}

    def follows_from_itself(self, name: str) -> bool:
        """Whether a buffer gets what is the same in every call: of constants and other buffers."""
        roles, changed = self.roles, self.changed
        waiting = [node for node, role in self.ends if role.name == name]
        seen: set[fx.Node] = set()
        for node in waiting:  # grows
            role = roles.get(node)
            if is_random(node) or (role is not None and role.kind is not InputKind.CONSTANT):
                if role is None or role.kind is not InputKind.BUFFER or role.name in changed:
                    return False
            waiting += (other for other in node.all_input_nodes if other not in seen)
            seen.update(node.all_input_nodes)
        return bool(waiting)

    def would_differentiate(self, name: str) -> bool:
        """Whether gradients of an objective would flow to a buffer that required some."""
        objectives = {node for node, role in self.ends if role.kind is OutputKind.OBJECTIVE}
        waiting = [node for node, role in self.roles.items() if role.name == name]
        seen = set(waiting)
        for node in waiting:  # grows
            users = [u for u in node.users if u not in seen and _passes_gradients(u)]
            seen.update(users)
            waiting += users
        return not objectives.isdisjoint(seen)

    @property
    def scaled_tables(self) -> dict[str, int]:
        """Parameters whose rows the step scales -> the result that says by what."""
        results = [role for role in self.outputs if role.kind is OutputKind.RESULT]
        return {role.name: role.index for role in results if role.name}

    @property
    def rewritten(self) -> tuple[str, ...]:
        """Paths of arguments that the step changes, whose new values are among its results."""
        return rewritten_paths(self.result_spec)

    @property
    def lines_of_flags(self) -> list[str]:
        """Lines that are equal on two ranks if their steps leave the same flags."""
        return [f"requires_grad of {n} becomes {flag.value}" for n, flag in self.flags.items()]

    @property
    def placeholders(self) -> list[fx.Node]:
        """Placeholder nodes, in the order of `inputs`."""
        return self.graph.find_nodes(op="placeholder")

    @property
    def roles(self) -> dict[fx.Node, InputRole]:
        """The role of every placeholder, in the order of `inputs`."""
        return dict(zip(self.placeholders, self.inputs, strict=True))

    @property
    def output_nodes(self) -> list[fx.Node]:
        """Nodes that the graph returns, in the order of `outputs`."""
        return outputs_of(self.graph)

    @property
    def ends(self) -> list[tuple[fx.Node, OutputRole]]:
        """What the graph returns, with the role of each; a node may have several."""
        return list(zip(self.output_nodes, self.outputs, strict=True))


def without_inputs(step: StepGraph, names: Collection[str]) -> StepGraph:
    """A step without its inputs of some names, which no node reads; its graph changes in place."""
    kept: list[InputRole] = []
    for node, role in step.roles.items():
        if role.name in names:
            assert not node.users, f"{role.name} is read"
            step.graph.erase_node(node)
        else:
            kept.append(role)
    return replace(step, inputs=tuple(kept))


def with_ends(
    step: StepGraph, ends: Sequence[tuple[fx.Node, OutputRole]], **changes: Any
) -> StepGraph:
    """A step that returns some nodes, and is another in some fields; its graph changes in place."""
    step.graph.output_node().args = (tuple(node for node, _ in ends),)
    step.graph.eliminate_dead_code()
    return replace(step, outputs=tuple(role for _, role in ends), **changes)


def module_path(node: fx.Node) -> str:
    """The innermost module that runs the node; empty for the user's own function."""
    return _innermost(node.meta.get("nn_module_stack"))


def _innermost(stack: Mapping[str, tuple[str, Any]] | None) -> str:
    return next((path for path, _ in reversed([*(stack or {}).values()]) if path), "")


def place(node: fx.Node) -> str:
    """Where a node comes from: module path, and the user's line if known."""
    line = line_of(node).removeprefix(" at ")
    # A node of the derivative belongs to the module whose derivative it is.
    of_forward = _innermost(node.meta.get("fwd_nn_module_stack"))
    where = module_path(node) or of_forward or "the step function"
    return f"{where} ({line})" if line else where


def describe(node: fx.Node) -> str:
    """A node by its operator and where it comes from."""
    schema, own = (getattr(node.target, name, None) for name in ("_schema", "__name__"))
    # Where an operator was replaced by a function, that is named after it.
    name = schema.name if schema is not None else str(own or node.target).strip("_")
    return f"{name} in {place(node)}"


def may_draw(node: fx.Node) -> bool:
    """Whether the node's operator draws random numbers for some arguments."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _passes_gradients(node: fx.Node) -> bool:
    """Whether a result of the node could have a gradient, if what it reads required some."""
    if node.target is torch.ops.aten.detach.default:
        return False
    values = node.meta.get("val")
    values = values if isinstance(values, (tuple, list)) else (values,)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return any(value.is_floating_point() or value.is_complex() for value in tensors)


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers, so that running it twice gives different values.

    Attention, recurrent layers and dropouts draw none with a probability of 0, or in evaluation.
    """
    if not may_draw(node):
        return False
    given = named_arguments(node)
    is_idle = 0 in (given.get(name) for name in ("dropout", "dropout_p"))
    return not is_idle and False not in (given.get(name) for name in ("train", "training"))
