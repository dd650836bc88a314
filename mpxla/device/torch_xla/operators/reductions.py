"""Sums and maxima in the forms that XLA's CPU backend compiles and computes fastest.

That backend makes a reduction of more than 32 values in two: in windows of 32, then of what the
windows gave. Both are compiled anew wherever they stand, whereas a loop that XLA fused of several
operations is compiled once for all that are alike; and nothing is fused with windows, so that what
is summed is written to memory first. So here rows (the last dimensions) are *folded* before they
are reduced: the halves, and below 1024 the parts of 32, are added elementwise, which XLA fuses with
what makes them.

Columns, as in the gradient of a bias, are left to XLA. Folded, or as products with a matrix of
ones, they compile faster (a GPT's first step by 1 s), but steps of a BERT took 20 % longer.

Of a GPT with 8 blocks the first step compiled 177 windows and 86 reductions, 5 of 21 s. On one core
(us, 256 rows; compiled 8 times in one program, s):

                                     by XLA           here
                                     run  compile     run  compile
    squares, rows of 384              36     0.32      18     0.06
    squares, rows of 1024             87     0.27      86     0.18
    squares, rows of 4096           2646     0.41     424     0.12
    derivative of layer norm, 384    122     0.39      67     0.25
    derivative of softmax, 12 x 128  145     0.55      96     0.19

A graph keeps its arguments and its results. This module must not know about ranks.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mpxla.graph.typed import arguments_of
from mpxla.stage.cleanup import replace_call

__all__ = ["expand_reductions", "row_max", "row_sum"]

_aten = torch.ops.aten
_WINDOW = 32  # longest reduction that XLA computes as one
_MOST_PARTS = 32
_LONGEST_ROW = 2**16

_Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def expand_reductions(module: fx.GraphModule) -> None:
    """Replaces reductions of float32, and softmax with its relatives, by functions from here."""
    for node in list(module.graph.nodes):
        call = _call_for(node)
        if call is not None:
            replace_call(node, *call)
    module.graph.lint()
    module.recompile()


_Call = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


def _call_for(node: fx.Node) -> _Call | None:
    """The function and the arguments that compute the same as a node."""
    if node.target not in _SOFTMAXES and node.target not in _REDUCTIONS:
        return None
    tensors = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    if any(t.dtype is not torch.float32 or not t.numel() for t in tensors):
        return None
    shape, arguments = tensors[1].shape, arguments_of(node)
    if node.target in _SOFTMAXES:
        function, num_tensors = _SOFTMAXES[node.target]
        is_row = shape and arguments[num_tensors] % len(shape) == len(shape) - 1
        if not is_row or not _WINDOW < shape[-1] <= _LONGEST_ROW:
            return None
        return function, arguments[:num_tensors]
    dims = sorted(d % len(shape) for d in arguments[1] or ()) if shape and arguments[1:] else []
    count = math.prod(shape[d] for d in dims)
    is_row = len(dims) < len(shape) and dims == list(range(len(shape) - len(dims), len(shape)))
    if not is_row or not _WINDOW < count <= _LONGEST_ROW:
        return None
    return _REDUCTIONS[node.target], (arguments[0], len(dims), list(tensors[0].shape))


# --- rows ----------------------------------------------------------------------------------------


def row_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, which stays."""
    return _reduce_row(values, torch.add, functools.partial(torch.sum, dim=-1, keepdim=True))


def row_max(values: torch.Tensor) -> torch.Tensor:
    """Maximum over the last dimension, [..., N] to [..., 1]; not-a-numbers come through."""
    return _reduce_row(values, torch.maximum, functools.partial(torch.amax, dim=-1, keepdim=True))


def _reduce_row(
    values: torch.Tensor,
    operation: _Operation,
    reduction: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    length = values.shape[-1]
    if length <= _WINDOW:
        return reduction(values)
    num_halvings = max(0, math.ceil(math.log2(length / (_WINDOW * _MOST_PARTS))))
    unit = _WINDOW * 2**num_halvings
    whole = length // unit * unit
    folded = values[..., :whole]
    for _ in range(num_halvings):
        folded = operation(*folded.chunk(2, dim=-1))
    reduced = reduction(_combine(folded.split(_WINDOW, dim=-1), operation))
    if whole == length:
        return reduced
    return operation(reduced, _reduce_row(values[..., whole:], operation, reduction))


def _combine(parts: Sequence[torch.Tensor], operation: _Operation) -> torch.Tensor:
    """All parts in one, in pairs: rounding errors of sums stay small."""
    while len(parts) > 1:
        pairs = [operation(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]


def _rows(values: torch.Tensor, num_dims: int) -> torch.Tensor:
    return values.flatten(values.dim() - num_dims)


def _sum_of_rows(values: torch.Tensor, num_dims: int, shape: Sequence[int]) -> torch.Tensor:
    return row_sum(_rows(values, num_dims)).reshape(shape)


def _mean_of_rows(values: torch.Tensor, num_dims: int, shape: Sequence[int]) -> torch.Tensor:
    rows = _rows(values, num_dims)
    return (row_sum(rows) / rows.shape[-1]).reshape(shape)


def _max_of_rows(values: torch.Tensor, num_dims: int, shape: Sequence[int]) -> torch.Tensor:
    return row_max(_rows(values, num_dims)).reshape(shape)


# --- softmax and its relatives over rows ---------------------------------------------------------


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    powers = torch.exp(scores - row_max(scores))
    return powers / row_sum(powers)


def _safe_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax with zeros for rows in which every score is -inf, which their largest score tells."""
    largest = row_max(scores)
    is_empty = largest == -torch.inf
    powers = torch.exp(scores - torch.where(is_empty, 0.0, largest))
    return powers / torch.where(is_empty, 1.0, row_sum(powers))


def _log_softmax(scores: torch.Tensor) -> torch.Tensor:
    shifted = scores - row_max(scores)
    return shifted - torch.log(row_sum(torch.exp(shifted)))


def _softmax_backward(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return result * (grad - row_sum(grad * result))


def _log_softmax_backward(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return grad - torch.exp(result) * row_sum(grad)


_REDUCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.sum.dim_IntList: _sum_of_rows,
    _aten.mean.dim: _mean_of_rows,
    _aten.amax.default: _max_of_rows,
}
"""The function for rows: of a tensor, the number of their dimensions, the shape of the result."""

_SOFTMAXES: dict[Any, tuple[Callable[..., torch.Tensor], int]] = {
    _aten._softmax.default: (_softmax, 1),
    _aten._safe_softmax.default: (_safe_softmax, 1),
    _aten._log_softmax.default: (_log_softmax, 1),
    _aten._softmax_backward_data.default: (_softmax_backward, 2),
    _aten._log_softmax_backward_data.default: (_log_softmax_backward, 2),
}
"""The function for rows, and how many tensors it takes; the dimension follows them."""
