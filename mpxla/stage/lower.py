"""Lowering of a stage to its forward and backward graphs.

The stage's graph is traced together with its derivative on fake tensors of the device (so that
operators decompose as its backend wants them), then cut into

    forward:  (parameters, buffers, constants, inputs) -> (outputs, results, new buffers, saved)
    backward: (accumulators, saved, gradients of outputs, seed)
              -> (accumulators, gradients of inputs)

Saved values that are the stage's own arguments do not pass through the programs: the caller keeps
them. The backward adds to the gradient accumulators itself, so that a microbatch costs two
executions however many came before. `seed` is the gradient of every objective: a scalar that holds
the mean over microbatches (and later the loss scale), so that changing it compiles nothing.

This module must not know about ranks, schedules or how graphs are executed.
"""

import contextlib
import copy
from collections.abc import Callable, Container, Generator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module  # pyright: ignore[reportPrivateUsage]

from mpxla.device.backend import Lowering
from mpxla.errors import LoweringError, MpxlaError
from mpxla.graph import collectives
from mpxla.graph.functions import applied
from mpxla.graph.later_values import LATER, put_in_place
from mpxla.graph.recurrent import LAYER, unrolled
from mpxla.graph.stepgraph import describe
from mpxla.graph.tensor.varying import VARYING, draws_for_part
from mpxla.graph.typed import outputs_of, target_of
from mpxla.stage.accumulation import AccumulatingBackward, accumulator_spec
from mpxla.stage.cleanup import simplify
from mpxla.stage.joint import trace_alone, trace_joint
from mpxla.stage.layout import transpose_gradients, transpose_weights, transposed
from mpxla.stage.parts import drawing_own_part
from mpxla.stage.recompute import partition_joint
from mpxla.stage.saved_values import SavedValue, route_saved, set_outputs
from mpxla.stage.spec import StageSpec, TensorSpec

__all__ = ["LoweredStage", "TracedStage"]


@dataclass(frozen=True)
class LoweredStage:
    """The two graphs of a stage, on tensors of the lowering's device, with what their ports mean.

    Attributes:
        spec: the stage.
        forward: graph module; arguments as in the module docstring.
        forward_inputs: specs of its arguments.
        num_saved: how many saved values follow its other outputs.
        saved: for every saved argument of the backward, where it comes from.
        saved_specs: shapes and dtypes of the saved outputs.
        backward: None where nothing receives a gradient.
        backward_inputs: specs of its arguments (accumulators first, seed last).
        grad_ports: (output index, consumer stage) of every gradient argument, in order.
        transposed_weights: parameters whose transposes are the forward's last arguments.
        transposed_gradients: accumulators that hold the transpose of a gradient.
    """

    spec: StageSpec
    forward: fx.GraphModule
    forward_inputs: tuple[TensorSpec, ...]
    num_saved: int = 0
    saved: tuple[SavedValue, ...] = ()
    saved_specs: tuple[TensorSpec, ...] = ()
    backward: AccumulatingBackward | None = None
    backward_inputs: tuple[TensorSpec, ...] = ()
    grad_ports: tuple[tuple[int, int], ...] = ()
    transposed_weights: tuple[int, ...] = ()
    transposed_gradients: tuple[int, ...] = ()

    @property
    def num_accumulators(self) -> int:
        """Gradient accumulators: the first arguments and results of the backward."""
        return len(self.spec.trained)

    @property
    def accumulators(self) -> tuple[TensorSpec, ...]:
        """Their specs, as the backward takes and gives them: 16-bit parameters have wider ones."""
        return self.backward_inputs[: self.num_accumulators]


class TracedStage:
    """A stage whose derivative is known, and can be lowered so that more or less is kept for it.

    Args:
        spec: the stage.
        is_training: whether to derive a backward.
        lowering: what the backend wants.
        for_speed: whether to lay out weights and gradients anew, see `layout`.
        divided: names of parameters that are gathered for every use.

    Raises:
        LoweringError: an operator or its derivative cannot be traced for the device.
    """

    def __init__(
        self,
        spec: StageSpec,
        is_training: bool,
        lowering: Lowering,
        for_speed: bool = False,
        divided: Container[str] = (),
    ):
        self._again = [i for i, name in enumerate(spec.parameters) if name in divided]
        placeholders = [n for n in spec.graph.nodes if n.op == "placeholder"]
        self._inputs = tuple(TensorSpec.of(n.meta["val"]) for n in placeholders)
        self._spec, self._lowering, self._for_speed = spec, lowering, for_speed
        self._joint: fx.GraphModule | None = None
        if is_training and spec.has_backward:
            function, differentiated = _stage_function(spec, lowering), _differentiated_inputs(spec)
            with _named(spec):
                self._joint = simplify(
                    trace_joint(function, self._inputs, differentiated, _tangents(spec), lowering)
                )

    def lowered(self, share: float = 1.0) -> LoweredStage:
        """The two graphs of the stage; how much is kept for the backward: see `partition_joint`."""
        with _named(self._spec):
            return self._lower_alone() if self._joint is None else self._lower(self._joint, share)

    def _lower_alone(self) -> LoweredStage:
        spec, inputs, lowering = self._spec, self._inputs, self._lowering
        graph = simplify(trace_alone(_stage_function(spec, lowering), inputs, lowering))
        set_outputs(graph, outputs_of(graph.graph)[: spec.num_plain])
        lowering.expand(graph)
        return LoweredStage(spec, graph, inputs)

    def _lower(self, joint: fx.GraphModule, share: float) -> LoweredStage:
        spec, inputs, lowering = self._spec, self._inputs, self._lowering
        differentiated = _differentiated_inputs(spec)
        trained, others = differentiated[: len(spec.trained)], differentiated[len(spec.trained) :]
        num_outputs = spec.num_plain + spec.num_objectives
        forward, backward = partition_joint(joint, num_outputs, share, self._again)
        lowering.expand(forward)
        lowering.expand(backward)
        saved, saved_nodes = route_saved(forward, backward, spec.num_plain, spec.num_objectives)
        saved_specs = tuple(TensorSpec.of(n.meta["val"]) for n in saved_nodes)
        accumulators = [accumulator_spec(inputs[i]) for i in trained]
        weights: tuple[int, ...] = ()
        gradients: tuple[int, ...] = ()
        if self._for_speed and lowering.lays_out_weights:
            fixed = [i for i, name in enumerate(spec.parameters) if name not in spec.new_buffers]
            weights = transpose_weights(forward, fixed)
            gradients = transpose_gradients(backward, trained)
            for position in gradients:
                accumulators[position] = transposed(accumulators[position])
        grad_ports = tuple(
            (i, stage) for i, port in enumerate(spec.outputs) for stage in port.grad_sources
        )
        tangents = backward.graph.find_nodes(op="placeholder")[len(saved) :]
        objectives = tangents[len(tangents) - spec.num_objectives :]
        objective_specs = tuple(TensorSpec.of(node.meta["val"]) for node in objectives)
        is_double = any(objective.dtype == torch.float64 for objective in objective_specs)
        return LoweredStage(
            spec=spec,
            forward=forward,
            forward_inputs=(*inputs, *(transposed(inputs[index]) for index in weights)),
            num_saved=len(saved_nodes),
            saved=saved,
            saved_specs=saved_specs,
            backward=AccumulatingBackward(
                backward,
                num_accumulators=len(accumulators),
                num_saved=len(saved),
                port_of_grad=tuple(port for port, _ in grad_ports),
                objective_specs=objective_specs,
                input_specs=tuple(inputs[i] for i in others),
                gradients=tuple(differentiated),
                disguises_sums=lowering.disguises_sums,
            ),
            backward_inputs=(
                *accumulators,
                *(s.among(inputs, saved_specs) for s in saved),
                *(spec.outputs[i].spec for i, _ in grad_ports),
                TensorSpec((), torch.float64 if is_double else torch.float32),  # the seed
            ),
            grad_ports=grad_ports,
            transposed_weights=weights,
            transposed_gradients=gradients,
        )


@contextlib.contextmanager
def _named(spec: StageSpec) -> Generator[None]:
    """Errors of torch become errors of a stage."""
    try:
        yield
    except (MpxlaError, AssertionError):
        raise
    except Exception as error:  # torch raises anything while it traces
        raise LoweringError(
            f"stage {spec.index}: the derivative of the stage cannot be traced: {error}. Write the "
            f"operator that this names with others, or move it out of the step function."
        ) from error


class _Tracing(fx.Interpreter):
    """Runs the nodes of a stage; errors name the operator, its module and the user's line."""

    def __init__(self, index: int, module: fx.GraphModule):
        super().__init__(module)
        self.extra_traceback = False
        self._index = index
        self.later: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.target is LATER:
            _, now, reads, _ = self.fetch_args_kwargs_from_env(n)[0]
            is_here = [read.op != "placeholder" for read in cast(Any, n.args[2])]
            self.later.append((now, [r for r, here in zip(reads, is_here, strict=True) if here]))
        try:
            return super().run_node(n)
        except (MpxlaError, AssertionError):
            raise
        except Exception as error:  # torch raises anything here
            raise LoweringError(
                f"stage {self._index}: {describe(n)} cannot be traced for the device: {error}. "
                f"Write it with other operators, or move it out of the step function."
            ) from error


def _differentiated_inputs(spec: StageSpec) -> list[int]:
    """Indices of the arguments that get a gradient: trained parameters, then inputs."""
    trained = [spec.parameters.index(name) for name in spec.trained]
    return trained + [spec.first_input + i for i, port in enumerate(spec.inputs) if port.has_grad]


def _tangents(spec: StageSpec) -> list[TensorSpec | None]:
    """The gradients that the stage gets, by its outputs."""
    found = [port.spec if port.grad_sources else None for port in spec.outputs]
    found += [None] * (spec.num_plain - len(found))
    return found + [TensorSpec.of(n.meta["val"]) for n in outputs_of(spec.graph)[len(found) :]]


def _stage_function(spec: StageSpec, lowering: Lowering) -> Callable[..., list[torch.Tensor]]:
    """The stage as a function of its arguments; only what carries gradients stays attached."""
    module = _make_graph_module(torch.nn.Module(), _on_device(spec.graph, lowering))
    attached = [tangent is not None for tangent in _tangents(spec)]

    def run(*arguments: torch.Tensor) -> list[torch.Tensor]:
        # Node by node: what the lowered graph says about module paths is taken from here.
        tracing = _Tracing(spec.index, module)
        outputs = tracing.run(*arguments)
        # Results must not be arguments, nor share memory with each other.
        results = [
            (value if keep else value.detach()).clone()
            for value, keep in zip(outputs, attached, strict=True)
        ]
        put_in_place(tracing.later)
        return results

    return run


def _on_device(graph: fx.Graph, lowering: Lowering) -> fx.Graph:
    """A copy of the graph whose device constants name the device, in operators that it has."""
    made = copy.deepcopy(graph)

    def moved(value: Any) -> Any:
        return lowering.device if isinstance(value, torch.device) else value

    for node in made.nodes:
        if node.op == "call_function":
            own = applied(node.target, lambda part: _on_device(part, lowering))
            own = own or collectives.lowered(node.target)
            draws = draws_for_part(node)
            if node.target is LAYER:
                own = unrolled
            node.target = lowering.replacements.get(node.target) or own or node.target
            if draws:
                node.target = drawing_own_part(target_of(node), *node.meta[VARYING])
            node.args = tuple(moved(a) for a in node.args)
            node.kwargs = {
                k: moved(v) for k, v in node.kwargs.items() if k not in ("pin_memory", "layout")
            }
    return made
