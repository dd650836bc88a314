"""Cuts one batch of a `Trainer` into microbatches whose weighted losses add up to its loss.

A loss over a batch is a mean over what counts: rows, or labels other than -100; or, given the
number of items of all accumulated batches, a sum divided by it. Microbatch i with n_i of the n
items that count in the batch gets the weight w_i = n_i / n and, of the given number N, the share
N n_i / n. Then the sum over microbatches of w_i loss_i is the batch's loss in both cases,
whichever of them the model's loss is:

    mean loss:  sum_i (n_i / n) (S_i / n_i)          = sum_i S_i / n
    sum / N:    sum_i (n_i / n) (S_i / (N n_i / n))  = sum_i S_i / N

Programs have a fixed number of microbatches of one shape. A batch that does not divide (the last
of an epoch) is cut into fewer of equal size; the rest repeat rows, with weight 0.

An example may have several rows: trainers on preferences put the answers that were chosen into the
first half of a batch, and those that were rejected into the second. A microbatch has all rows of
its examples then, in the same order.
This module must not know transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

__all__ = ["Batch", "cut_batch", "num_rows_of"]

_IGNORED = -100
"""Label that losses leave out, in torch and in transformers."""


@dataclass(frozen=True)
class Batch:
    """Arguments of a model that step functions split by themselves (SMP's `smp_slice`).

    Attributes:
        inputs: the arguments, as the loader gave them.
        rows: [num_microbatches, rows of one]; which rows each microbatch has.
        examples: [num_microbatches, examples of one]; the same of what has one row per example.
        weights: [num_microbatches], float32.
        num_items: [num_microbatches], float32: the microbatch's share of the given number of items.
        num_rows: rows of the batch.
        num_real: microbatches that are not repetitions.
    """

    inputs: Mapping[str, Any]
    rows: torch.Tensor
    examples: torch.Tensor
    weights: torch.Tensor
    num_items: torch.Tensor
    num_rows: int
    num_examples: int
    num_real: int

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> dict[str, Any]:
        """Arguments and numbers of one microbatch."""
        taken = {self.num_examples: self.examples[mb], self.num_rows: self.rows[mb]}
        return {
            "inputs": {k: _take(v, taken) for k, v in self.inputs.items()},
            "weight": self.weights[mb],
            "num_items": self.num_items[mb],
        }


def cut_batch(
    inputs: Mapping[str, Any],
    num_microbatches: int,
    num_items: Any = None,
    *,
    is_shifted: bool,
    is_training: bool,
    rows_per_example: int = 1,
    is_whole: bool = False,
) -> Batch:
    """Cuts the arguments of a model.

    Args:
        inputs: tensors with the batch as axis 0, others (numbers, None) as they are.
        num_microbatches: how many.
        num_items: number of items that count in all accumulated batches, or None.
        is_shifted: whether the first label of a row does not count, as for causal language models.
        is_training: whether a microbatch without items that count is replaced, since its loss of
            0 / 0 would reach the gradients.
        rows_per_example: of a batch with the first rows of all examples, then the second ones...
        is_whole: whether one microbatch has all rows.
    """
    num_rows = num_rows_of(inputs)
    if num_rows % rows_per_example:
        rows_per_example = 1
    num_examples = num_rows // rows_per_example
    num_real = 1 if is_whole else _number_of_parts(num_examples, num_microbatches)
    examples = torch.arange(num_examples).reshape(num_real, -1)
    rows = torch.cat([examples + k * num_examples for k in range(rows_per_example)], 1)
    counts = _items_that_count(inputs, rows, examples, is_shifted)
    sources = list(range(num_real))
    if is_training and counts.sum():
        full = int(counts.argmax())
        sources = [part if counts[part] else full for part in sources]
    sources += [sources[0]] * (num_microbatches - num_real)
    if not counts.sum():
        counts = torch.ones_like(counts)
    counts = torch.cat([counts, counts.new_zeros(num_microbatches - num_real)])
    shares = counts / counts.sum()
    total = 1.0 if num_items is None else float(num_items)
    return Batch(
        inputs,
        rows[sources],
        examples[sources],
        shares.float(),
        # Of a microbatch without weight it is divided by as well, and 0 x inf would be no number.
        torch.where(shares > 0, shares * total, total).float(),
        num_rows,
        num_examples,
        num_real,
    )


def num_rows_of(inputs: Mapping[str, Any]) -> int:
    """Rows of a batch, by its first tensor."""
    tensors = [v for v in inputs.values() if isinstance(v, torch.Tensor) and v.dim()]
    return tensors[0].shape[0] if tensors else 1


def _number_of_parts(num_rows: int, limit: int) -> int:
    """Largest number up to `limit` that divides the rows."""
    return next(n for n in range(min(limit, max(num_rows, 1)), 0, -1) if num_rows % n == 0)


def _items_that_count(
    inputs: Mapping[str, Any], rows: torch.Tensor, examples: torch.Tensor, is_shifted: bool
) -> torch.Tensor:
    """[parts], float64: by labels, or by rows where there are none that say it."""
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, torch.Tensor) or not labels.dim():
        return torch.full((len(rows),), float(rows.shape[1]), dtype=torch.float64)
    if is_shifted and "shift_labels" not in inputs:
        labels = labels[..., 1:]
    counted = labels.cpu().ne(_IGNORED).reshape(labels.shape[0], -1).sum(1, dtype=torch.float64)
    return counted[rows if len(counted) == rows.numel() else examples].sum(1)


def _take(value: Any, taken: Mapping[int, torch.Tensor]) -> Any:
    """Of each tensor the indices along axis 0 that `taken` has for its length."""
    if isinstance(value, torch.Tensor):
        rows = taken.get(value.shape[0]) if value.dim() else None
        return value if rows is None else value[rows.to(value.device)]
    if isinstance(value, Mapping):
        return {k: _take(v, taken) for k, v in cast(Mapping[str, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_take(v, taken) for v in cast(list[Any], value))
    return value
