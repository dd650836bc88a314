"""The graph of a step with the roles of its inputs and outputs, from the functional program.

This module must not know how a step is traced.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind as ExportInput
from torch.export.graph_signature import OutputKind as ExportOutput

from mpxla.errors import CaptureError
from mpxla.graph.chosen.rules import rule_of
from mpxla.graph.chosen.values import fix_sizes
from mpxla.graph.fakes import fake_tensor
from mpxla.graph.gradients import expand_gradients
from mpxla.graph.gradients_in_functions import expand_gradients_in_functions
from mpxla.graph.hooked import place_hooks
from mpxla.graph.later_values import settle_reads
from mpxla.graph.normalize import check_operators, normalize
from mpxla.graph.python.counts import check_counts
from mpxla.graph.python.rewritten import ChangedArgumentError
from mpxla.graph.reaching import leave_out_unused
from mpxla.graph.renorms import replace_renorms
from mpxla.graph.stepgraph import InputKind, InputRole, OutputKind, OutputRole, describe
from mpxla.graph.typed import input_of, outputs_of
from mpxla.graph.user_code import line_of

__all__ = ["Constants", "FunctionalStep", "StaleTensorError", "constants_of", "functional_step"]

_STATE = {
    ExportInput.PARAMETER: InputKind.PARAMETER,
    ExportInput.BUFFER: InputKind.BUFFER,
}
Constants = dict[str, torch.Tensor]
"""Tensors that a program computes with and that are no state of the model, by role."""


@dataclass(frozen=True)
class FunctionalStep:
    """See `StepGraph`, whose fields these are."""

    graph: fx.Graph
    inputs: tuple[InputRole, ...]
    outputs: tuple[OutputRole, ...]


def functional_step(
    program: ExportedProgram,
    canonical_names: Mapping[str, str],
    trainable: Collection[str],
    written: Collection[str],
    num_objectives: int,
    checks: Collection[int],
    is_trial: bool,
    fake_mode: FakeTensorMode,
) -> FunctionalStep:
    """Reads roles off a functional program, and annotates its nodes with fake values.

    Args:
        program: of a step; its graph is changed in place.
        canonical_names: any name of a parameter or buffer -> the one name used for it.
        trainable: parameters, by those names.
        written: those of them whose new values are known to have their gradients.
        num_objectives: the first results are what is differentiated, so many of them.
        checks: results, counted after those, that tell whether a mask is true anywhere.
        is_trial: the step will not run, and may ask for gradients where there are none.
        fake_mode: of the fake values.

    Raises:
        CaptureError: the step does something that a captured one cannot.
    """
    graph = program.graph_module.graph
    inputs = _input_roles(program, canonical_names)
    scaled = replace_renorms(graph)
    unknown = set(trainable) - set(written)
    outputs = _output_roles(program, canonical_names, unknown, num_objectives, scaled)
    ends = list(zip(outputs_of(graph), outputs, strict=True))
    masks = [input_of(node) for node, role in ends if role.is_among(checks)]
    settle_reads(graph, [node for node, role in ends if role.kind is OutputKind.OBJECTIVE])
    check_operators(graph)
    place_hooks(graph, inputs)
    check_counts(graph)
    fix_sizes(graph, rule_of, masks, fake_mode)
    normalize(graph)
    expand_gradients_in_functions(graph)
    expand_gradients(graph)
    _name_returned(graph)
    graph.eliminate_dead_code()
    is_trained = [r.kind is InputKind.PARAMETER and r.name in trainable for r in inputs]
    _annotate(program.graph_module, is_trained, num_objectives > 0, fake_mode)
    if leave_out_unused(graph, [n for n, r in ends if r.kind is OutputKind.OBJECTIVE]):
        graph.eliminate_dead_code()
        _annotate(program.graph_module, is_trained, num_objectives > 0, fake_mode)
    if not is_trial:
        _check_objectives(graph, outputs)
    return FunctionalStep(graph, tuple(inputs), tuple(outputs))


def _name_returned(graph: fx.Graph) -> None:
    """Has a stage compute also what is returned as it came: `self.mean.copy_(self.last)`."""
    end, returned = graph.output_node(), outputs_of(graph)
    with graph.inserting_before(end):
        for place, node in enumerate(returned):
            if node.op == "placeholder":
                returned[place] = graph.call_function(torch.ops.aten.detach.default, (node,))
    end.args = (tuple(returned),)


class StaleTensorError(CaptureError):
    """A step uses a tensor of another capture, which something has kept."""


def constants_of(program: ExportedProgram) -> Constants:
    """Those of a program.

    Raises:
        StaleTensorError: one has no numbers, as it is none: torch has lost where it comes from.
    """
    specs = program.graph_signature.input_specs
    targets = [s.target or "" for s in specs if s.kind is ExportInput.CONSTANT_TENSOR]
    values = {name: cast(torch.Tensor, program.constants[name]) for name in targets}
    if any(isinstance(value, FakeTensor) for value in values.values()):
        raise StaleTensorError(
            "The step function uses a tensor that something outside of the model has kept from an "
            "earlier capture or from this one. Either it appends tensors to a list, dictionary or "
            "object that is no part of the model (states of a metric, say) and reads them there: "
            "return these tensors from the step and collect them outside, or make what holds them "
            "a part of the model. Or a profiler or debugger, in a thread, keeps the frames of "
            "running functions. Start it after the first call of the step function."
        )
    return {_name(target): value.detach() for target, value in values.items()}


def _name(target: str | None) -> str:
    """Of a tensor of the user's model, which is a part of what was traced."""
    return (target or "").removeprefix("model.")


def _input_roles(program: ExportedProgram, canonical_names: Mapping[str, str]) -> list[InputRole]:
    roles: list[InputRole] = []
    num_leaves = 0
    for spec in program.graph_signature.input_specs:
        name = _name(spec.target)
        if spec.kind in _STATE:
            roles.append(InputRole(_STATE[spec.kind], canonical_names[name]))
        elif spec.kind is ExportInput.CONSTANT_TENSOR:
            roles.append(InputRole(InputKind.CONSTANT, name))
        elif spec.kind is ExportInput.USER_INPUT:
            roles.append(InputRole(InputKind.STEP_INPUT, index=num_leaves))
            num_leaves += 1
        else:
            raise CaptureError(f"The step function captures an unsupported object: {spec}.")
    return roles


def _output_roles(
    program: ExportedProgram,
    canonical_names: Mapping[str, str],
    unknown: Container[str],
    num_objectives: int,
    scaled: Container[int],
) -> list[OutputRole]:
    """Roles by place; results that are for the runtime come after those of the user.

    Parameters are `unknown` where gradients would not go by what was written to them.
    """
    roles: list[OutputRole] = []
    specs = program.graph_signature.output_specs
    num_values, num_scaled = 0, 0
    num_results = sum(s.kind is ExportOutput.USER_OUTPUT for s in specs) - num_objectives
    for place, spec in enumerate(specs):
        name = canonical_names.get(_name(spec.target), "")
        # By its name: torch 2.9 does not list this kind.
        is_known = spec.kind.name == "PARAMETER_MUTATION" and name not in unknown
        if place in scaled:
            index, num_scaled = num_results + num_scaled, num_scaled + 1
            roles.append(OutputRole(OutputKind.RESULT, name, index))
        elif spec.kind is ExportOutput.BUFFER_MUTATION or is_known:
            roles.append(OutputRole(OutputKind.BUFFER, name))
        elif spec.kind is ExportOutput.USER_INPUT_MUTATION:
            raise _changed_argument(program, spec.target or "")
        elif spec.kind is not ExportOutput.USER_OUTPUT:
            raise CaptureError(
                f"The step function changes the parameter or constant {_name(spec.target)} in place"
                f"{_line_of_change(program, spec.target)}, by a function that a captured step "
                f"does not know to write to it. Write param.data.copy_(new) or, under "
                f"torch.no_grad(), param.copy_(new); make it a buffer of the model if it is no "
                f"parameter."
            )
        else:
            index, num_values = num_values, num_values + 1
            if index < num_objectives:
                roles.append(OutputRole(OutputKind.OBJECTIVE, index=index))
            else:
                roles.append(OutputRole(OutputKind.RESULT, index=index - num_objectives))
    return roles


def _check_objectives(graph: fx.Graph, outputs: Sequence[OutputRole]) -> None:
    """Checks that the graph still leads from every objective to what is trained.

    Each required a gradient when `model.backward` was called with it.
    """
    for node, role in zip(outputs_of(graph), outputs, strict=True):
        if role.kind is OutputKind.OBJECTIVE and not node.meta["val"].requires_grad:
            raise CaptureError(
                f"The value that model.backward was called with has lost its gradient while the "
                f"step function was captured ({describe(node)}). This is a fault of mpxla or of "
                f"torch.export; please report it with the step function."
            )


def _changed_argument(program: ExportedProgram, name: str) -> ChangedArgumentError:
    value = next(node for node in program.graph.nodes if node.name == name).meta["val"]
    place = [*program.graph_signature.user_inputs].index(name)
    dtype = str(value.dtype).removeprefix("torch.")
    return ChangedArgumentError(
        f"The step function changes one of its arguments in place{_line_of_change(program, name)}, "
        f"the tensor {dtype}{list(value.shape)} (the shape of one microbatch). Change a copy: "
        f"x = x.clone().",
        place,
    )


def _line_of_change(program: ExportedProgram, target: str | None) -> str:
    """The user's line that gives an input its new value."""
    nodes = {node.name: node for node in program.graph.nodes}
    changed = (s for s in program.graph_signature.output_specs if s.target == target)
    return next((line_of(nodes[spec.arg.name]) for spec in changed), "")


def _annotate(
    module: fx.GraphModule,
    requires_grad: Sequence[bool],
    is_training: bool,
    fake_mode: FakeTensorMode,
) -> None:
    """Runs the graph on fake tensors so that every node's value knows if it requires grad."""
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    arguments = [
        fake_tensor(fake_mode, v.shape, v.stride(), v.dtype).requires_grad_(is_trained)
        for v, is_trained in zip(values, requires_grad, strict=True)
    ]
    with fake_mode, torch.set_grad_enabled(is_training):
        annotator = _Annotator(module)
        annotator.extra_traceback = False  # errors name the node
        annotator.run(*arguments)


class _Annotator(fx.Interpreter):
    """Stores every node's fake result, with its `requires_grad`, in `meta["val"]`."""

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise CaptureError(
                f"{describe(n)}: the shape of its result, or the way it goes on, depends on values "
                f"({error.func}). A step is captured once, with fixed shapes: use a mask and "
                f"torch.where, `topk` with a fixed number or `torch.nonzero_static`, or do it "
                f"before the step function and pass the result in."
            ) from error
        n.meta["val"] = result
        return result
