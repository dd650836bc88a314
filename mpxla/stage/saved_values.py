"""What a stage's forward hands to its backward, once both are cut from the joint graph.

A saved value that is an argument of the stage, or a view of one, does not pass through the
programs: the caller keeps the argument. This module must not know how the graphs are traced or
executed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import fx

from mpxla.graph.typed import input_of, outputs_of, target_of
from mpxla.stage.cleanup import is_view

__all__ = ["SavedValue", "route_saved", "set_outputs"]


_T = TypeVar("_T")


@dataclass(frozen=True)
class SavedValue:
    """Where the backward finds one of its saved arguments.

    Attributes:
        argument: index among the forward's arguments, if it is one of them.
        output: else index among the saved outputs of the forward.
    """

    argument: int | None = None
    output: int | None = None

    def among(self, arguments: Sequence[_T], outputs: Sequence[_T]) -> _T:
        """The one that it is, or what is known of it, among those of the forward."""
        if self.output is not None:
            return outputs[self.output]
        assert self.argument is not None
        return arguments[self.argument]


def set_outputs(module: fx.GraphModule, values: Sequence[fx.Node]) -> None:
    """Makes a graph return these values, and removes what nothing reads then."""
    module.graph.output_node().args = (tuple(values),)
    module.graph.eliminate_dead_code()
    module.recompile()


def route_saved(
    forward: fx.GraphModule, backward: fx.GraphModule, num_plain: int, num_objectives: int
) -> tuple[tuple[SavedValue, ...], list[fx.Node]]:
    """Makes the forward save what the backward reads and has no other way to, each value once.

    Not all that is handed over is read: the derivative of a convolution by its weight alone does
    not read the weight, and says so only when it is written with other operators. Objectives are
    no longer among the outputs.
    """
    arguments = {node: i for i, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    values = outputs_of(forward.graph)
    saved = values[num_plain + num_objectives :]
    holders = backward.graph.find_nodes(op="placeholder")[: len(saved)]
    routes: list[SavedValue] = []
    unique: dict[fx.Node, int] = {}
    for value, holder in zip(saved, holders, strict=True):
        if not holder.users:
            backward.graph.erase_node(holder)
            continue
        node = _without_views(value, holder)
        if node in arguments:
            routes.append(SavedValue(argument=arguments[node]))
        else:
            routes.append(SavedValue(output=unique.setdefault(node, len(unique))))
    set_outputs(forward, [*values[:num_plain], *unique])
    backward.graph.lint()
    backward.recompile()
    return tuple(routes), list(unique)


def _without_views(value: fx.Node, holder: fx.Node) -> fx.Node:
    """The argument that a value is a view of (a transposed weight, say), or what is read itself.

    As an output the view would be a copy for every microbatch; made by the backward, from what it
    holds then, it costs nothing. So with views that only the backward reads: attention saves
    transposes of what it multiplies.
    """
    source, chain = value, list[fx.Node]()
    while is_view(source):
        chain.append(source)
        source = input_of(source)
    if source.op != "placeholder":
        chain = _for_backward(chain)
        source = input_of(chain[-1]) if chain else value
    if not chain:
        return value
    users, rebuilt, graph = list(holder.users), holder, holder.graph
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        for view in reversed(chain):
            arguments = (rebuilt, *view.args[1:])
            rebuilt = graph.call_function(target_of(view), arguments, dict(view.kwargs))
            rebuilt.meta = dict(view.meta)
    holder.meta = dict(source.meta)
    for user in users:
        user.replace_input_with(holder, rebuilt)
    return source


def _for_backward(chain: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of views, the last first, that the forward does not read, and that are no smaller."""
    found: list[fx.Node] = []
    for view in chain:
        is_smaller = view.meta["val"].numel() < input_of(view).meta["val"].numel()
        if is_smaller or any(u.op != "output" and u not in found for u in view.users):
            break
        found.append(view)
    return found
