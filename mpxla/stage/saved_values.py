"""What a stage's forward hands to its backward, once both are cut from the joint graph.

A saved value that is an argument of the stage, or a view of one, does not pass through the
programs: the caller keeps the argument. This module must not know how the graphs are traced or
executed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import fx

from mpxla.graph.typed import input_of, outputs_of
from mpxla.stage.cleanup import is_view

__all__ = ["SavedValue", "drop_unread", "rebuild_views", "route_saved", "set_outputs"]


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


def drop_unread(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Saves nothing that the backward does not read.

    The derivative of a convolution by its weight alone does not read the weight, and says so only
    when it is written with other operators.
    """
    values = outputs_of(forward.graph)
    saved, read = values[num_outputs:], []
    holders = backward.graph.find_nodes(op="placeholder")[: len(saved)]
    for node, holder in zip(saved, holders, strict=True):
        if holder.users:
            read.append(node)
        else:
            backward.graph.erase_node(holder)
    set_outputs(forward, [*values[:num_outputs], *read])
    backward.recompile()


def rebuild_views(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Saves the argument of a view (a transposed weight, say) in place of the view.

    As an output the view would be a copy for every microbatch; in the backward it costs nothing.
    """
    values = outputs_of(forward.graph)
    saved = values[num_outputs:]
    holders = backward.graph.find_nodes(op="placeholder")[: len(saved)]
    for position, (node, holder) in enumerate(zip(saved, holders, strict=True)):
        chain = []
        while is_view(node):
            chain.append(node)
            node = input_of(node)
        if not chain or node.op != "placeholder":
            continue
        saved[position] = node
        users, rebuilt = list(holder.users), holder
        first = next(n for n in backward.graph.nodes if n.op != "placeholder")
        with backward.graph.inserting_before(first):
            for view in reversed(chain):
                rebuilt = backward.graph.call_function(
                    view.target, (rebuilt, *view.args[1:]), dict(view.kwargs)
                )
                rebuilt.meta = dict(view.meta)
        holder.meta = dict(node.meta)
        for user in users:
            user.replace_input_with(holder, rebuilt)
    set_outputs(forward, [*values[:num_outputs], *saved])
    backward.graph.lint()
    backward.recompile()


def route_saved(
    forward: fx.GraphModule, num_plain: int, num_objectives: int
) -> tuple[tuple[SavedValue, ...], list[fx.Node]]:
    """Drops objectives and repeated or passed-on values from the forward's outputs."""
    arguments = {node: i for i, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    values = outputs_of(forward.graph)
    plain, saved = values[:num_plain], values[num_plain + num_objectives :]
    routes: list[SavedValue] = []
    unique: dict[fx.Node, int] = {}
    for node in saved:
        if node in arguments:
            routes.append(SavedValue(argument=arguments[node]))
        else:
            routes.append(SavedValue(output=unique.setdefault(node, len(unique))))
    set_outputs(forward, [*plain, *unique])
    return tuple(routes), list(unique)
