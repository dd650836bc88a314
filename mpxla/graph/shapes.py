"""Shapes of operators for which PyTorch asks for values, though a bound is known without them, or
which it gets wrong.

`ctc_loss` with lengths in tensors saves a table as wide as the longest target, which is a value.
The widest that the shape of the targets allows is as good: what is beyond a target is never read.
The residuals of `linalg.lstsq` are there or not, depending on ranks of matrices; with the usual
driver of the CPU they never are. `linalg_vector_norm` keeps a dim of one element that is counted
from the end, where the kernel takes it away (torch 2.9).
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses import fake_impls

from mpxla.graph.exchanged import restored

__all__ = ["static_shapes", "vector_norm"]

_aten = torch.ops.aten
_norm_of_torch = decomposition_table[_aten.linalg_vector_norm.default]


@contextlib.contextmanager
def static_shapes() -> Generator[None]:
    """Gives fake tensors these shapes while a step is captured or traced.

    They are put into PyTorch's tables of such rules, and taken out again: other code of the process
    sees PyTorch's own.
    """
    rules: dict[Any, Any] = fake_impls.op_implementations_dict
    with restored(rules, decomposition_table):
        rules.update({op: rule for op, rule in _RULES.items() if op not in rules})
        decomposition_table[_aten.linalg_vector_norm.default] = vector_norm  # of symbolic sizes
        yield


def vector_norm(
    tensor: torch.Tensor,
    order: float = 2,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """PyTorch's way to write the norm, which compares its dims with those from the first."""
    num_dims = max(1, tensor.dim())
    dims = None if dims is None else [d + num_dims if d < 0 else d for d in dims]
    return _norm_of_torch(tensor, order, dims, keepdim, dtype=dtype)


def _vector_norm(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    with mode:
        return vector_norm(*args, **kwargs)


def _ctc_loss(
    mode: Any, operator: Any, log_probs: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    num_steps, count = log_probs.shape[:2]
    width = 2 * targets.shape[-1] + 1
    return log_probs.new_empty((count,)), log_probs.new_empty((count, num_steps, width))


def _lstsq(
    mode: Any,
    operator: Any,
    matrix: torch.Tensor,
    right: torch.Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
) -> Any:
    if driver not in (None, "gelsy") or right.dim() != matrix.dim():
        return NotImplemented
    *batch, _, width = matrix.shape
    solution = right.new_empty((*batch, width, right.shape[-1]))
    rank = matrix.new_empty(batch, dtype=torch.int64)
    return solution, matrix.new_empty((0,)), rank, matrix.new_empty((0,))


_RULES = {
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten.linalg_lstsq.default: _lstsq,
    _aten.linalg_vector_norm.default: _vector_norm,
}
