"""What a captured step says to the other members of a group of ranks.

In a step, a value is *equal* on all members of a group or it *varies*: a shard of the weights, and
what is computed with it. Operators lead from one to the other (Megatron-LM, arXiv:1909.08053, calls
the first two f and g), each with the derivative that a loss equal on all members needs:

    operator   takes    gives                      derivative
    vary       equal    the same, as varying       sum over the members
    sum        varying  sum over the members       the same, as varying
    gather     varying  parts one after the other  the own part
    look_up    equal    rows of words that are in  that of the own rows
                        the own part of a table,
                        zeros for all others
    loss       varying  cross entropy of scores    that of the own scores
                        that are split by words
    sum of     varying  own positions of the sum   all positions
    positions
    join       parts    all positions, as varying  own positions of the sum
    positions
    own        equal    own positions              all positions
    positions
    own part   equal    the own part               parts one after the other

In the step they are operators of mpxla, which export sees as one node. `lowered` gives what runs in
their place where a stage is traced: PyTorch's functional collectives (`_c10d_functional`), which
backends put into programs or run between them. Groups go by name; what a name means is handed down
when a program is compiled.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mpxla.errors import CaptureError, StepError
from mpxla.graph.typed import Function
from mpxla.graph.user_code import at_user_line

__all__ = [
    "CROSS_ENTROPY",
    "EMBEDDING",
    "GATHER",
    "JOIN_POSITIONS",
    "OWN_PART",
    "OWN_POSITIONS",
    "REPLICA_GROUP",
    "SHARDS",
    "SUM",
    "SUM_OF_POSITIONS",
    "TENSOR_GROUP",
    "VARY",
    "collective_bytes",
    "gather_parts",
    "is_collective",
    "is_of_group",
    "join_replicas",
    "look_up",
    "lowered",
    "own_part",
    "resized",
    "sum_over",
    "vary",
]

REPLICA_GROUP = "replicas"
"""Name of the group of ranks that hold the same tensors, each with data of its own."""
TENSOR_GROUP = "tensor"
"""Name of the group of ranks that share the tensors of one partition."""

SHARDS = "_mpxla_shards"
"""Attribute of a split layer: names of its split parameters, and which part it has of each."""

_collective = torch.ops._c10d_functional
_library = torch.library.Library("mpxla_tensor", "DEF")


def is_collective(node: fx.Node) -> bool:
    """Whether a node of a lowered graph is a functional collective, or the wait for one."""
    return getattr(node.target, "namespace", "") == "_c10d_functional"


def collective_bytes(node: fx.Node) -> int:
    """What a rank of a large group sends for a node of a lowered graph; 0 for no collective.

    An all-reduce is a reduce-scatter and an all-gather, each of which moves the whole value once.
    """
    if not is_collective(node) or node.target is _collective.wait_tensor.default:
        return 0
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    sizes = [v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor)]
    return max(sizes, default=0) * (2 if node.target is _collective.all_reduce.default else 1)


def _all_reduce(value: torch.Tensor, group: str) -> torch.Tensor:
    started = _collective.all_reduce.default(value.contiguous(), "sum", group)
    return _collective.wait_tensor.default(started)


def _copy(value: torch.Tensor, group: str) -> torch.Tensor:
    return value.clone()  # an argument that is returned would be taken for a view of itself


def _all_gather(value: torch.Tensor, dim: int, size: int, index: int, group: str) -> torch.Tensor:
    """Parts of all members, one after the other along a dim."""
    first = value.movedim(dim, 0).contiguous()
    started = _collective.all_gather_into_tensor.default(first, size, group)
    return _collective.wait_tensor.default(started).movedim(0, dim)


def _reduce_scatter(
    value: torch.Tensor, dim: int, size: int, index: int, group: str
) -> torch.Tensor:
    """The own part, along a dim, of the sum over the members."""
    first = value.movedim(dim, 0).contiguous()
    started = _collective.reduce_scatter_tensor.default(first, "sum", size, group)
    return _collective.wait_tensor.default(started).movedim(0, dim)


def _own(value: torch.Tensor, dim: int, size: int, index: int, group: str) -> torch.Tensor:
    """The own part along a dim of what is equal on all members."""
    length = value.shape[dim] // size
    return value.narrow(dim, index * length, length).clone()


def _by_member(value: torch.Tensor, dim: int, outer: int, inner: int) -> torch.Tensor:
    """A value whose pieces along a dim come in another order: first by the inner of two counts."""
    if outer == 1 or inner == 1:
        return value
    pieces = value.unflatten(dim, (outer, inner, -1)).transpose(dim, dim + 1)
    return pieces.flatten(dim, dim + 2)


def _with_derivative(
    function: Callable[..., torch.Tensor], derivative: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """A function of a value; the derivative takes its gradient, and what else the function took."""

    class WithDerivative(Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, *where: Any) -> torch.Tensor:
            ctx.where = where
            return function(value, *where)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return derivative(gradient, *ctx.where), *(None for _ in ctx.where)

    # A function of a module: the code of a graph cannot name the `apply` of a class.
    def run(value: torch.Tensor, *where: Any) -> torch.Tensor:
        return WithDerivative.apply(value, *where)

    return run


_sum = _with_derivative(_all_reduce, _copy)


def resized(value: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """A tensor without values, like another one but for the number of elements along a dim."""
    shape = [*value.shape]
    shape[dim] = length
    return value.new_empty(shape)


def _same(value: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _gathered(value: torch.Tensor, dim: int, size: int, index: int, group: str) -> torch.Tensor:
    return resized(value, dim, value.shape[dim] * size)


def _scattered(value: torch.Tensor, dim: int, size: int, *_: Any) -> torch.Tensor:
    return resized(value, dim, value.shape[dim] // size)


def _own_rows(
    rows: torch.Tensor, words: torch.Tensor, size: int, index: int, padding: int, group: str
) -> torch.Tensor:
    own = rows.shape[0]
    local = words - index * own
    is_own = ((local >= 0) & (local < own)).unsqueeze(-1)
    # Words of other ranks become some word of this one, whose row is then not counted.
    found = torch.nn.functional.embedding(local.clamp(0, own - 1), rows)
    if padding >= 0:
        found = torch.where((words == padding).unsqueeze(-1), found.detach(), found)
    return torch.where(is_own, found, torch.zeros_like(found))


def _loss_of_parts(
    scores: torch.Tensor,
    labels: torch.Tensor,
    size: int,
    index: int,
    reduction: int,
    ignore_index: int,
    group: str,
) -> torch.Tensor:
    """Cross entropy of scores [tokens, own words] and labels [tokens] among the words of all."""
    own = scores.shape[1]
    counts = labels != ignore_index
    local = labels - index * own
    is_own = (local >= 0) & (local < own) & counts
    # Any number near the largest score keeps the exponentials in range; it needs no derivative.
    largest = _collective.all_reduce.default(scores.detach().amax(1), "max", group)
    shifted = scores - _collective.wait_tensor.default(largest).unsqueeze(1)
    picked = shifted.gather(1, local.clamp(0, own - 1).unsqueeze(1)).squeeze(1)
    picked = torch.where(is_own, picked, torch.zeros_like(picked))
    total, picked = _sum(torch.stack([shifted.exp().sum(1), picked]), group).unbind(0)
    losses = torch.where(counts, total.log() - picked, torch.zeros_like(picked))
    if reduction == 0:
        return losses
    return losses.sum() / counts.sum() if reduction == 1 else losses.sum()


def _define(
    schema: str, shape: Callable[..., torch.Tensor], function: Callable[..., torch.Tensor]
) -> Any:
    """An operator that only says what it gives, and whether that has a gradient."""
    name = schema.partition("(")[0]
    _library.define(schema)
    operator = getattr(torch.ops.mpxla_tensor, name).default

    def refuse_derivative(*_: Any) -> None:
        raise CaptureError(
            f"torch.autograd.grad in a step function{at_user_line()} differentiates a module "
            f"whose weights are split over ranks, which it cannot. Leave that module whole: "
            f"smp.set_tensor_parallelism(module, False)."
        )

    def refuse(*_: Any) -> torch.Tensor:
        raise StepError(
            "a module whose tensors are split over ranks was called outside a step function. Call "
            "the model in a function decorated with @smp.step; one that does not call "
            "model.backward serves for evaluation."
        )

    _library.impl(name, refuse, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mpxla_tensor::{name}", shape, lib=_library)
    torch.library.register_autograd(f"mpxla_tensor::{name}", refuse_derivative, lib=_library)
    _FUNCTIONS[operator] = function
    return operator


_FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {}

VARY = _define(
    "vary(Tensor value, str group) -> Tensor", _same, _with_derivative(_copy, _all_reduce)
)
SUM = _define("sum(Tensor value, str group) -> Tensor", _same, _sum)
_ALONG = "(Tensor value, int dim, int size, int index, str group) -> Tensor"
GATHER = _define(f"gather{_ALONG}", _gathered, _with_derivative(_all_gather, _own))
SUM_OF_POSITIONS = _define(
    f"sum_of_positions{_ALONG}", _scattered, _with_derivative(_reduce_scatter, _all_gather)
)
JOIN_POSITIONS = _define(
    f"join_positions{_ALONG}", _gathered, _with_derivative(_all_gather, _reduce_scatter)
)
OWN_POSITIONS = _define(f"own_positions{_ALONG}", _scattered, _with_derivative(_own, _all_gather))
OWN_PART = _define(
    "own_part(Tensor value, int dim, int size, int index, int blocks, str group) -> Tensor",
    _scattered,
    _with_derivative(
        lambda value, dim, size, index, blocks, group: _own(
            _by_member(value, dim, blocks, size), dim, size, index, group
        ),
        lambda part, dim, size, index, blocks, group: _by_member(
            _all_gather(part, dim, size, index, group), dim, size, blocks
        ),
    ),
)
EMBEDDING = _define(
    "embedding(Tensor rows, Tensor words, int size, int index, int padding, str group) -> Tensor",
    lambda rows, words, *_: rows.new_empty((*words.shape, rows.shape[1])),
    _own_rows,
)

CROSS_ENTROPY = _define(
    "cross_entropy(Tensor scores, Tensor labels, int size, int index, int reduction, "
    "int ignore_index, str group) -> Tensor",
    lambda scores, labels, size, index, reduction, *_: scores.new_empty(
        labels.shape if reduction == 0 else ()
    ),
    _loss_of_parts,
)


def is_of_group(node: fx.Node) -> bool:
    """Whether a node of a step is one of these operators."""
    return node.target in _FUNCTIONS


def lowered(target: Any) -> Callable[..., torch.Tensor] | None:
    """What is traced in the place of one of these operators; None for others."""
    return _FUNCTIONS.get(target)


def vary(value: torch.Tensor) -> torch.Tensor:
    """An equal value [...], from here on as one that varies over the group."""
    return VARY(value, TENSOR_GROUP)


def sum_over(value: torch.Tensor) -> torch.Tensor:
    """Sum of a varying value [...] over the group, equal on all members."""
    return SUM(value, TENSOR_GROUP)


def gather_parts(
    value: torch.Tensor, dim: int, size: int, index: int, blocks: int = 1
) -> torch.Tensor:
    """Parts of all `size` members one after the other along a dim, equal on all members.

    With more `blocks` along the dim, each of which is divided: block after block.
    """
    dim %= value.dim()
    return _by_member(GATHER(value, dim, size, index, TENSOR_GROUP), dim, size, blocks)


def own_part(value: torch.Tensor, dim: int, size: int, index: int, blocks: int = 1) -> torch.Tensor:
    """This member's part of a value that is equal on all `size` members; see `gather_parts`."""
    return OWN_PART(value, dim, size, index, blocks, TENSOR_GROUP)


def join_replicas(value: torch.Tensor, size: int) -> torch.Tensor:
    """Values [1, ...] of all `size` replicas, [size, ...]; each has a loss of its own.

    The derivative is the sum over the replicas.
    """
    return JOIN_POSITIONS(value, 0, size, 0, REPLICA_GROUP)  # no function of it reads the index


def look_up(
    rows: torch.Tensor, words: torch.Tensor, size: int, index: int, padding: int | None = None
) -> torch.Tensor:
    """Rows [..., width] of the words in the own part of a table, and zeros for all others.

    `rows` is the own part [words / size, width]; `words`, of any shape, are of the whole table. The
    row of the word `padding` is not trained.
    """
    return EMBEDDING(rows, words, size, index, -1 if padding is None else padding, TENSOR_GROUP)
