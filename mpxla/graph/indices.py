"""Which values a step uses as indices, and what range they may have.

PyTorch raises for an id beyond a table; a compiled program reads some row of it. So the ranges are
found in the captured graph. Indices that follow from the step's inputs alone, by operators on
integers, are computed and checked on the host before the step runs. All others can be reported by
the programs: two more results, the least and the greatest.
This module must not know how a step is run.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mpxla.graph.collectives import CROSS_ENTROPY, EMBEDDING, is_of_group
from mpxla.graph.split import ancestors, copy_nodes
from mpxla.graph.stepgraph import (
    InputKind,
    OutputKind,
    OutputRole,
    StepGraph,
    is_random,
    with_ends,
)
from mpxla.graph.stepgraph import module_path as path_of
from mpxla.graph.typed import named_arguments, origin_of
from mpxla.graph.user_code import line_of

__all__ = ["IndexUse", "InputIndices", "find_index_uses", "indices_of_inputs", "with_extremes"]

_aten = torch.ops.aten
_NO_INDEX = -1 << 63
"""Stands for "nothing is ignored": the least int64, which is no index anywhere."""


@dataclass(frozen=True)
class IndexUse:
    """One tensor of indices that one operator reads.

    Attributes:
        operator: its name, such as `aten.embedding`.
        where: the module and the user's line, for error texts.
        low: least index that is allowed.
        high: greatest index that is allowed.
        ignored: one more value that is allowed (`ignore_index`).
    """

    operator: str
    where: str
    low: int
    high: int
    ignored: int = _NO_INDEX

    def problem(self, low: int, high: int) -> str | None:
        """What is wrong with indices from `low` to `high` (those ignored left out), or None."""
        if self.low <= low and high <= self.high:
            return None
        value = high if high > self.high else low
        allowed = f"from {self.low} to {self.high}"
        if self.ignored != _NO_INDEX:
            allowed += f", or {self.ignored} (ignore_index)"
        return f"index {value}, and {self.operator} in {self.where} takes indices {allowed}"

    def extremes(self, indices: torch.Tensor) -> torch.Tensor:
        """Least and greatest of some indices that count, shape [2]."""
        if self.ignored != _NO_INDEX:
            indices = torch.where(indices == self.ignored, self.low, indices)
        return torch.stack(torch.aminmax(indices))


@dataclass(frozen=True)
class InputIndices:
    """How indices follow from the tensors that a step is given.

    Attributes:
        leaves: positions of the tensors among the tensor leaves of the call.
        compute: tensors of one microbatch -> the indices of every use.
        uses: what they are used for.
    """

    leaves: tuple[int, ...]
    compute: Callable[..., Sequence[torch.Tensor]]
    uses: tuple[IndexUse, ...]

    def problem(self, microbatches: Iterable[Iterable[torch.Tensor]]) -> tuple[int, str] | None:
        """(place of the first microbatch with a wrong index, what is wrong with it), or None.

        Of each microbatch, of which there is one at least, the tensors of `leaves` on the host.
        """
        with torch.no_grad():
            made = [self.compute(*tensors) for tensors in microbatches]
        for use, *indices in zip(self.uses, *made, strict=True):
            # All at once: of small ones most time goes into starting operators.
            together = torch.cat([values.flatten() for values in indices])
            if use.problem(*use.extremes(together).tolist()) is None:
                continue
            for number, values in enumerate(indices):
                text = use.problem(*use.extremes(values).tolist())
                if text is not None:
                    return number, text
        return None


# --- ranges of operators ------------------------------------------------------------------------


def _size(node: Any, dim: int) -> int:
    shape = node.meta["val"].shape
    return shape[dim] if len(shape) else 1


def _rows(table: Any, indices: Any, *_: Any) -> list[tuple[Any, int, int]]:
    return [(indices, 0, _size(table, 0) - 1)]


def _rows_of_all(rows: Any, words: Any, size: int, *_: Any) -> list[tuple[Any, int, int]]:
    return [(words, 0, size * _size(rows, 0) - 1)]


def _along(value: Any, dim: int, indices: Any, *_: Any) -> list[tuple[Any, int, int]]:
    return [(indices, 0, _size(value, dim) - 1)]


def _filled(value: Any, dim: int, indices: Any, *_: Any) -> list[tuple[Any, int, int]]:
    return [(indices, -_size(value, dim), _size(value, dim) - 1)]


def _wraps_along_dim() -> bool:
    try:
        torch.take_along_dim(torch.zeros(1), torch.tensor([-1]), 0)
    except (IndexError, RuntimeError):
        return False
    return True


_WRAPS_ALONG_DIM = _wraps_along_dim()
"""Whether this function takes all indices, by their remainder, as it does from torch 2.13 on."""


def _along_dim(value: Any, indices: Any, dim: int | None = None) -> list[tuple[Any, int, int]]:
    if _WRAPS_ALONG_DIM:
        return []
    size = value.meta["val"].numel() if dim is None else _size(value, dim)
    return [(indices, 0, size - 1)]


def _taken(value: Any, indices: Any, *_: Any) -> list[tuple[Any, int, int]]:
    size = value.meta["val"].numel()
    return [(indices, -size, size - 1)]


def _bracketed(value: Any, indices: Any, *_: Any) -> list[tuple[Any, int, int]]:
    """`value[i, :, j]`, where masks are no indices."""
    return [
        (index, -_size(value, dim), _size(value, dim) - 1)
        for dim, index in enumerate(indices)
        if index is not None and index.meta["val"].dtype not in (torch.bool, torch.uint8)
    ]


def _classes(scores: Any, labels: Any, *_: Any) -> list[tuple[Any, int, int]]:
    if labels.meta["val"].is_floating_point():
        return []  # probabilities
    dim = 1 if scores.meta["val"].dim() > 1 else 0
    return [(labels, 0, _size(scores, dim) - 1)]


def _classes_of_all(scores: Any, labels: Any, size: int, *_: Any) -> list[tuple[Any, int, int]]:
    return [(labels, 0, size * _size(scores, 1) - 1)]


def _hot(labels: Any, num_classes: int = -1) -> list[tuple[Any, int, int]]:
    return [] if num_classes < 0 else [(labels, 0, num_classes - 1)]


_RANGES: dict[Any, Callable[..., list[tuple[Any, int, int]]]] = {
    _aten.embedding: _rows,
    EMBEDDING.overloadpacket: _rows_of_all,
    _aten.embedding_bag: _rows,
    _aten._embedding_bag: _rows,
    _aten._embedding_bag_forward_only: _rows,
    _aten.index_select: _along,
    _aten.gather: _along,
    _aten.scatter: _along,
    _aten.scatter_add: _along,
    _aten.scatter_reduce: _along,
    _aten.index_add: _along,
    _aten.index_copy: _along,
    _aten.index_reduce: _along,
    _aten.index_fill: _filled,
    _aten.take_along_dim: _along_dim,
    _aten.take: _taken,
    _aten.put: _taken,
    _aten.index: _bracketed,
    _aten._unsafe_index: _bracketed,
    _aten.index_put: _bracketed,
    _aten.one_hot: _hot,
    _aten.cross_entropy_loss: _classes,
    CROSS_ENTROPY.overloadpacket: _classes_of_all,
    _aten.nll_loss: _classes,
    _aten.nll_loss_nd: _classes,
    _aten.nll_loss2d: _classes,
    _aten.nll_loss_forward: _classes,
    _aten.nll_loss2d_forward: _classes,
    _aten.multi_margin_loss: _classes,
}


def find_index_uses(step: StepGraph) -> list[tuple[fx.Node, fx.Node, IndexUse]]:
    """(operator, its indices, their range) for everything that is indexed in a step."""
    found: list[tuple[fx.Node, fx.Node, IndexUse]] = []
    for node in step.graph.nodes:
        ranges = _RANGES.get(getattr(node.target, "overloadpacket", None))
        if ranges is None:
            continue
        arguments = named_arguments(node)
        ignored = arguments.get("ignore_index", _NO_INDEX)
        where = f"{path_of(node) or 'the step function'}{line_of(node)}"
        name = str(node.target).rpartition(".")[0]
        for indices, low, high in ranges(*arguments.values()):
            if isinstance(indices, fx.Node) and indices.meta["val"].numel():
                found.append((node, indices, IndexUse(name, where, low, high, ignored)))
    return found


# --- indices that follow from inputs ------------------------------------------------------------


def indices_of_inputs(step: StepGraph) -> tuple[InputIndices, ...]:
    """The indices of a step that the host can compute from the step's inputs.

    One entry for every set of inputs that lead to indices: an input that is not on the host spoils
    what depends on it only.
    """
    roles = step.roles
    groups: dict[tuple[fx.Node, ...], list[tuple[fx.Node, IndexUse]]] = {}
    for _, indices, use in find_index_uses(step):
        sources = _sources(indices, roles)
        if sources:
            groups.setdefault(sources, []).append((indices, use))
    return tuple(
        InputIndices(
            tuple(roles[source].index for source in sources),
            _host_function(sources, [indices for indices, _ in uses]),
            tuple(use for _, use in uses),
        )
        for sources, uses in groups.items()
    )


def _sources(indices: fx.Node, roles: Any) -> tuple[fx.Node, ...] | None:
    """Inputs from which the indices follow by operators on integers alone; None if they do not."""
    found = ancestors([indices], lambda n: n in roles or not _is_cheap(n))
    sources = [node for node in found if node in roles]
    are_given = all(roles[source].kind is InputKind.STEP_INPUT for source in sources)
    is_known = are_given and all(node in roles or _is_cheap(node) for node in found)
    return tuple(sorted(sources)) if is_known else None


def _is_cheap(node: fx.Node) -> bool:
    """Whether the host may repeat an operator: one on integers, a view, or a cast of an input."""
    if is_random(node) or is_of_group(node):
        return False
    if getattr(node.target, "is_view", False) or node.target is _aten._to_copy.default:
        return True
    values = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    return all(isinstance(v, torch.Tensor) and not v.is_floating_point() for v in values)


def _host_function(
    sources: Sequence[fx.Node], indices: Sequence[fx.Node]
) -> Callable[..., Sequence[torch.Tensor]]:
    nodes = sorted(ancestors(indices, sources.__contains__).difference(sources))
    return fx.GraphModule(torch.nn.Module(), copy_nodes(sources, nodes, indices))


# --- indices that programs report ---------------------------------------------------------------


def with_extremes(step: StepGraph) -> StepGraph:
    """Adds results to a step: the extremes of the indices of every use, in the order of the uses.

    The graph is changed in place.
    """
    uses = find_index_uses(step)
    first = sum(role.kind is OutputKind.RESULT for role in step.outputs)
    added = [_add_extremes(step.graph, *use) for use in uses]
    roles = [OutputRole(OutputKind.RESULT, index=first + place) for place in range(len(added))]
    return with_ends(step, [*step.ends, *zip(added, roles, strict=True)])


def _add_extremes(graph: fx.Graph, user: fx.Node, indices: fx.Node, use: IndexUse) -> fx.Node:
    """Nodes that do what `IndexUse.extremes` does, at the operator that reads the indices."""

    def call(target: Any, *arguments: Any) -> fx.Node:
        node = graph.call_function(target, arguments)
        values = fx.map_arg(arguments, lambda n: n.meta["val"])
        with indices.meta["val"].fake_mode, torch.no_grad():
            node.meta = {**origin_of(user), "val": target(*values)}
        return node

    with graph.inserting_before(user):
        if use.ignored != _NO_INDEX:
            is_ignored = call(_aten.eq.Scalar, indices, use.ignored)
            indices = call(_aten.masked_fill.Scalar, indices, is_ignored, use.low)
        parts = [call(target, indices) for target in (_aten.min.default, _aten.max.default)]
        return call(_aten.stack.default, parts)
