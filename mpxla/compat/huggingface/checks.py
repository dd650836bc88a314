"""Whether the loss of a batch is the weighted mean of the losses of its microbatches.

That is so for the losses of transformers' models. A `compute_loss` of another trainer may weight
the rows of a batch (by classes) or compare them with each other (contrastive losses), which a
microbatch cannot: its numbers would be others, in silence. So it is tried once, on the host, with
made-up outputs of the model: this costs no call of the model and depends on nothing but
`compute_loss`.
"""

import math
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree

from mpxla.compat.huggingface.batches import Batch
from mpxla.compat.huggingface.metrics import (
    Played,
    depends_on_others,
    in_place_of,
    loss_of,
    shadow_of,
)
from mpxla.stage.spec import TensorSpec
from mpxla.user_lines import at_script_line

__all__ = ["check_loss", "joined", "note_outputs"]

_KINDS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By trainers. (Step functions would take another attribute of a trainer for another trainer.)"""
_TRIED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Trainers, and whether it was with several microbatches."""
_TOLERANCE = {"rel_tol": 1e-3, "abs_tol": 1e-5}
"""Some losses compute in float32, whatever they get."""


def note_outputs(trainer: Any, outputs: list[Any]) -> None:
    """Keeps what a captured `compute_loss` has got from the model: shapes and dtypes."""
    if not _TRIED.get(trainer):
        _KINDS[trainer] = pytree.tree_map_only(torch.Tensor, TensorSpec.of, outputs)


def check_loss(trainer: Any, batch: Batch, num_items: Any) -> str | None:
    """Tries `compute_loss` after the first step of a trainer, and after the first of several parts.

    Returns:
        Why the batch has to be one microbatch; None if it has not.

    Raises:
        CompatError: the loss of one microbatch would be another one, too.
    """
    kinds, are_several = _KINDS.get(trainer), batch.num_real > 1
    if kinds is None or _TRIED.get(trainer) in (True, are_several):
        return None
    _TRIED[trainer] = are_several
    name, losses, problem = type(trainer).__name__, [], ""
    for dtype in (torch.float64, None):  # some losses want the type of the model or of labels
        try:
            losses = _losses(trainer, batch, kinds, num_items, dtype)
            break
        except Exception as error:  # of code of other libraries, with values that no model gave
            problem = f"{type(error).__name__}: {error}"
    else:
        return (
            f"{at_script_line()}: the loss of {name} could not be tried on made-up outputs of the "
            f"model ({problem}): it may weight the rows of a batch, or compare them with each other"
        )
    if any(math.isclose(found.real, found.of_parts, **_TOLERANCE) for found in losses):
        return None
    if not any(math.isclose(found.real, found.alone, **_TOLERANCE) for found in losses):
        numbers = f"it is {losses[0].real:.6g}, and {losses[0].alone:.6g} without"
        raise depends_on_others(trainer, f" (on made-up outputs of the model {numbers})")
    real, _, of_parts = losses[0]
    return (
        f"{at_script_line()}: the loss of {name} is not the mean of the losses of its "
        f"microbatches (on made-up outputs of the model, the batch has {real:.6g} and the "
        f"microbatches {of_parts:.6g}): it weights the rows of a batch, or compares them with "
        f"each other"
    )


class _Losses(NamedTuple):
    """Of one batch: as it is, without other processes, and as the mean of its microbatches."""

    real: float
    alone: float
    of_parts: float


def _losses(
    trainer: Any, batch: Batch, kinds: list[Any], num_items: Any, dtype: torch.dtype | None
) -> list[_Losses]:
    """Those of one batch, for each order that outputs may have, in one dtype or in their own."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        pytree.tree_map(lambda k: _made_up(k, generator, dtype), kinds)
        for _ in range(batch.num_real)
    ]
    num = batch.num_real
    shares = (batch.weights[:num] / batch.weights.sum()).tolist()
    total = 0.0
    for i, share in enumerate(shares):
        taken = batch.smp_slice(num, i, 0)
        items = None if num_items is None else taken["num_items"]
        if share:
            total += share * _play(trainer, parts[i], taken["inputs"], items)
    found: list[_Losses] = []
    for join in (joined, partial(joined, is_stacked=True)):
        whole = pytree.tree_map(lambda *each, join=join: join(list(each), batch, shares), *parts)
        # With results of accelerator.gather, and as a step does: without.
        real, alone = (
            _play(trainer, whole, dict(batch.inputs), num_items, accelerator)
            for accelerator in (trainer.accelerator, None)
        )
        found.append(_Losses(real, alone, total))
    return found


def _made_up(kind: Any, generator: torch.Generator, dtype: torch.dtype | None) -> Any:
    """Values that are probabilities, embeddings or scores as well."""
    if not isinstance(kind, TensorSpec):
        return kind
    if kind.dtype.is_floating_point:
        return torch.rand(kind.shape, generator=generator, dtype=dtype or kind.dtype)
    return torch.randint(0, 2, kind.shape, generator=generator).to(kind.dtype)


def _play(
    trainer: Any,
    outputs: list[Any],
    inputs: dict[str, Any],
    num_items: Any,
    accelerator: Any = None,
) -> float:
    shadow, silent = shadow_of(trainer)
    shadow.accelerator = accelerator or silent
    played = Played(trainer.model, outputs)
    with torch.no_grad(), in_place_of(trainer.model, played, trainer):
        loss = loss_of(played, shadow.compute_loss, inputs, num_items)
    return float(loss.mean())


def joined(
    parts: list[Any], batch: Batch, shares: list[float] | None = None, is_stacked: bool = False
) -> Any:
    """One output of the microbatches as that of the batch. Of numbers it is the mean.

    Rows are in the order of the batch's (the first rows of all examples, then the second ones...).
    With `is_stacked`, so are those of outputs that have other multiples of the examples, as where
    `compute_loss` puts several inputs into one call of the model.
    """
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    if not parts[0].dim():
        shares = shares or [1 / len(parts)] * len(parts)
        return sum(part * share for part, share in zip(parts, shares, strict=True))
    size, length = batch.examples.shape[1], parts[0].shape[0]
    if length == batch.rows.shape[1] or (is_stacked and length % size == 0):
        return torch.cat([part.unflatten(0, (-1, size)) for part in parts], 1).flatten(0, 1)
    return torch.cat(parts)
