"""`torch.autograd.grad` in hooks and backwards, of what the step has computed before.

Deep equilibrium models solve for their gradient so: a hook on the equilibrium differentiates one
turn of the layer, which `forward` has computed, again and again.

The operator of such a function holds the call in its backward, and its results and leaves are among
the operator's inputs. Here the part of the step from leaves to results is repeated in the backward,
where the call can be expanded like others; what that part reads becomes further inputs.

This module must not know how functions are traced.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import fx

from mpxla.errors import CaptureError
from mpxla.graph.functions import TracedFunction, operator_of, traced_function
from mpxla.graph.gradients import GRADIENTS_OF, LEAF, expand_call, path_of, without_detaches
from mpxla.graph.stepgraph import is_random
from mpxla.graph.typed import arguments_of, input_of, outputs_of
from mpxla.graph.user_code import line_of

__all__ = ["expand_gradients_in_functions"]


def expand_gradients_in_functions(graph: fx.Graph) -> None:
    """Expands calls of `torch.autograd.grad` in the backwards of a step's functions.

    Args:
        graph: of a functional step; it is changed in place.

    Raises:
        CaptureError: random numbers are drawn between leaves and results.
    """
    for node in list(graph.nodes):
        function = traced_function(node.target)
        if function is not None and _calls(function.backward):
            _Expanded(graph, node, function).replace()


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=GRADIENTS_OF)


class _Expanded:
    """One operator of a step with the function that it stands for."""

    def __init__(self, graph: fx.Graph, node: fx.Node, function: TracedFunction):
        self._graph, self._node, self._function = graph, node, function
        self._given: list[fx.Node] = list(arguments_of(node)[0])
        self._forward = copy.deepcopy(function.forward)
        self._backward = copy.deepcopy(function.backward)
        self._num_saved = len(outputs_of(self._forward)) - len(function.results)
        self._inside: dict[fx.Node, fx.Node] = {}  # of the step -> what the backward has for it

    def replace(self) -> None:
        """Has the node call an operator whose backward differentiates by itself."""
        outside = self._outside_of_placeholders()
        for call in _calls(self._backward):
            results, leaves, *rest = arguments_of(call)
            ends, since = [outside[n] for n in results], [outside[n] for n in leaves]
            since = [without_detaches(leaf) for leaf in since]
            path = path_of(self._graph, self._node, ends, since)
            sources = [input_of(n) if n.target is LEAF else n for n in since]
            self._repeat(path, sources)
            inner = [self._inside[n] for n in ends], [self._inside[n] for n in sources]
            call.args = (*inner, *rest)
            expand_call(self._backward, call)
        self._backward.eliminate_dead_code()
        count = len(self._given) - len(self._function.is_differentiated)
        function = replace(
            self._function,
            forward=self._forward,
            backward=self._backward,
            is_differentiated=(*self._function.is_differentiated, *(False for _ in range(count))),
        )
        self._node.target = cast(Any, operator_of(function))
        self._node.args = (self._given,)

    def _outside_of_placeholders(self) -> dict[fx.Node, fx.Node]:
        """The node of the step for what the backward reads of the operator's inputs."""
        inputs = self._forward.find_nodes(op="placeholder")
        given: Mapping[Any, fx.Node] = dict(zip(inputs, self._given, strict=True))
        saved = outputs_of(self._forward)[len(self._function.results) :]
        places = self._backward.find_nodes(op="placeholder")
        return {p: given[s] for p, s in zip(places, saved, strict=False) if s in given}

    def _repeat(self, path: Mapping[fx.Node, None], sources: Sequence[fx.Node]) -> None:
        """Computes again in the backward what leads from leaves to results."""
        if drawn := next((n for n in path if is_random(n)), None):
            raise CaptureError(
                f"A hook or a backward{line_of(self._node)} calls torch.autograd.grad for what is "
                f"computed with random numbers before{line_of(drawn)}. Compute it in the hook, "
                f"under torch.enable_grad()."
            )
        for node in [*sources, *(n for p in path for n in p.all_input_nodes)]:
            if node not in self._inside and node not in path:
                self._inside[node] = self._hand_on(node)
        start = next(n for n in self._backward.nodes if n.op != "placeholder")
        for node in path:
            if node not in self._inside:
                with self._backward.inserting_before(start):
                    made = self._backward.node_copy(node, lambda n: self._inside[n])
                self._inside[node] = made

    def _hand_on(self, node: fx.Node) -> fx.Node:
        """Makes a node of the step an input that the forward saves."""
        handed = _added(self._forward, node, len(self._given))
        self._given.append(node)
        self._forward.output_node().args = ((*outputs_of(self._forward), handed),)
        self._num_saved += 1
        return _added(self._backward, node, self._num_saved - 1)


def _added(graph: fx.Graph, node: fx.Node, place: int) -> fx.Node:
    """A placeholder for a node of another graph, as the one with a number."""
    before = [n for n in graph.nodes if n.op == "placeholder"][:place]
    following = before[-1].next if before else next(iter(graph.nodes))
    with graph.inserting_before(following):
        made = graph.placeholder(f"handed_{node.name}")
    made.meta = dict(node.meta)
    return made
