"""Parameters that are written to between their use and the backward.

PyTorch's derivatives read what a parameter holds when they run: by `weight.data.clamp_()` after its
use, they see the clamped weight. The operator `later` stands at the end of a step for one such
parameter: its result is the value that the parameter gets, and derivatives of what has read `reads`
are to find `now` there. A stage that holds both puts it there, between its forward and its
derivative, where autograd does not see it; so what reads them stays on that stage.

By `weight.data = other` (the first `num_given` of the reads) the parameter leaves its memory. What
autograd keeps of a convolution is the parameter, which has other memory then, and of a linear layer
a view of the former memory.
"""

from collections.abc import Sequence

import torch
from torch import fx

from mpxla.errors import CaptureError
from mpxla.graph.functions import traced_function
from mpxla.graph.hooked import HOOKED
from mpxla.graph.split import ancestors
from mpxla.graph.stepgraph import describe
from mpxla.graph.typed import arguments_of, input_of, origin_of

__all__ = ["LATER", "put_in_place", "reads_of", "settle_reads"]

_library = torch.library.Library("mpxla_writes", "DEF")
_library.define("later(Tensor value, Tensor now, Tensor[] reads, int num_given) -> Tensor")
LATER = torch.ops.mpxla_writes.later.default
_aten = torch.ops.aten
_KEEP_PARAMETER = frozenset(
    f"aten::{name}"
    for name in "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "convolution mul mm layer_norm batch_norm group_norm rms_norm".split()
)
_KEEP_NOTHING = frozenset(
    f"aten::{name}"
    for name in "linear add sub embedding sum mean clone to _to_copy contiguous alias".split()
)
"""Or a view, as of linear layers."""


_library.impl("later", lambda value, *_: value.clone(), "CompositeExplicitAutograd")


def reads_of(node: fx.Node) -> list[fx.Node]:
    """Those of an operator `later`, and views of them."""
    found = list(arguments_of(node)[2])
    for read in found:  # grows
        found += [user for user in read.users if getattr(user.target, "is_view", False)]
    return found


def settle_reads(graph: fx.Graph, objectives: Sequence[fx.Node]) -> None:
    """Makes the reads of operators `later` tensors of their own, in place.

    Args:
        graph: of a functional step.
        objectives: what it differentiates.

    Raises:
        CaptureError: it is not known what autograd keeps of one.
    """
    first = next(node for node in graph.nodes if node.op != "placeholder")
    laters = graph.find_nodes(op="call_function", target=LATER)
    for node in laters:
        for copy in arguments_of(node)[2]:
            if copy.target is _aten.clone.default and input_of(copy).op == "placeholder":
                # What was read before any write reads the copy that was made before it.
                first.prepend(copy)
                input_of(copy).replace_all_uses_with(
                    copy,
                    lambda n, c=copy: n is not c and n.target is not _aten.detach.default,
                )
    # What gradients of objectives flow to, and more.
    derived = ancestors(objectives if laters else (), lambda n: n.target is _aten.detach.default)
    for node in laters:
        value, now, reads, num_given = arguments_of(node)
        given = [_kept(graph, read) for read in reads[:num_given] if read in derived]
        reads = [read for read in reads[num_given:] if read in derived]
        reads += [read for read in given if read is not None]
        node.args = (value, now, reads, 0)
        if not reads:
            node.replace_all_uses_with(value)
            graph.erase_node(node)


def _kept(graph: fx.Graph, read: fx.Node) -> fx.Node | None:
    """A copy for those that keep the parameter; None if there are none."""
    keeping: list[fx.Node] = []
    for user in read.users:
        name = getattr(getattr(user.target, "_schema", None), "name", "")
        function = traced_function(user.target)
        if function is not None and function.name == HOOKED:
            continue  # sees the gradient alone
        if name in _KEEP_PARAMETER:
            keeping.append(user)
        elif (
            name not in _KEEP_NOTHING
            and user.target not in (LATER, _aten.detach.default)
            and not getattr(user.target, "is_view", False)
        ):
            raise CaptureError(
                f"The step function gives a parameter other data (parameter.data = ...) between "
                f"its use and model.backward, and it is not known which of the two PyTorch's "
                f"derivative would read: {describe(user)}. Give the parameter its data before "
                f"its use, or after model.backward."
            )
    if not keeping:
        return None
    with graph.inserting_after(read):
        copy = graph.call_function(_aten.clone.default, (read,))
    copy.meta = origin_of(read, "custom")
    for user in keeping:
        user.replace_input_with(read, copy)
    return copy


def put_in_place(found: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]]) -> None:
    """Writes to what was read what is there later: (now, reads) of operators."""
    for now, reads in found:
        for read in reads:
            read.data.copy_(now)
