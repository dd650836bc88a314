"""Where gradients of the objectives flow, and where PyTorch has None in the place of zeros.

A parameter without a gradient is not touched by an optimizer; one with zeros is, by momentum and
weight decay. So functions whose backward gives None are followed argument by argument.
"""

import operator
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import fx

from mpxla.graph.functions import TracedFunction, hands_back, operator_of, traced_function
from mpxla.graph.typed import arguments_of
from mpxla.graph.user_code import line_of
from mpxla.log import warn_once

__all__ = ["leave_out_unused", "reaching", "requires_grad"]


def requires_grad(node: fx.Node) -> bool:
    """Whether a value, or one of several, depends on what is trained."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def reaching(graph: fx.Graph, objectives: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes through which gradients of objectives flow."""
    found = set(objectives)
    for node in reversed(list(graph.nodes)):
        if _is_reached(node, found):
            found.add(node)
    return found


def _is_reached(node: fx.Node, found: set[fx.Node]) -> bool:
    users = (user for user in node.users if user in found)
    return requires_grad(node) and any(hands_back(user, node) for user in users)


def leave_out_unused(graph: fx.Graph, objectives: Iterable[fx.Node]) -> bool:
    """Lets functions that tell results without a gradient from others have None for those.

    Args:
        graph: of a functional step whose values know whether they require a gradient; it is
            changed in place.
        objectives: what is differentiated.

    Returns:
        Whether there were any.
    """
    found, is_changed = set(objectives), False
    for node in reversed(list(graph.nodes)):
        function = traced_function(node.target)
        if function is not None and function.partial != ():
            is_changed |= _use_part(node, function, found)
        if _is_reached(node, found):
            found.add(node)
    return is_changed


def _use_part(node: fx.Node, function: TracedFunction, found: set[fx.Node]) -> bool:
    parts = [user for user in node.users if user in found]
    assert all(user.target is operator.getitem for user in parts), "it returns a list"
    places = {arguments_of(user)[1] for user in parts}
    used = tuple(i in places for i in range(len(function.results)))
    if function.partial is None and 0 < sum(used) < sum(function.has_gradient):
        line = line_of(node)
        warn_once(
            f"unused{line}",
            f"{function.name}{line} has {len(used)} results, of which some have no gradient. After "
            f"ctx.set_materialize_grads(False) PyTorch gives its backward None for them; here it "
            f"gets zeros, because there are more than a few. Parameters that are used for nothing "
            f"else then have zeros, which weight decay and momentum move, in place of no gradient.",
        )
    for partial in function.partial or ():
        if partial.used == used:
            inputs = arguments_of(node)[0]
            node.target = cast(Any, operator_of(partial.function))
            node.args = ([inputs[i] for i in partial.inputs],)
            return True
    return False
