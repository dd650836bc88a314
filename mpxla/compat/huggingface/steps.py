"""The step functions of a `Trainer`: its `compute_loss` for every microbatch."""

from typing import Any

import torch

import mpxla
from mpxla.compat.huggingface.checks import note_outputs
from mpxla.compat.huggingface.metrics import Recording, computed

__all__ = ["evaluate", "predict", "train"]


@mpxla.step(non_split_inputs=["trainer", "has_count"])
def train(model: Any, trainer: Any, batch: Any, has_count: bool) -> Any:
    """Forward and backward of a microbatch, by the `compute_loss` of a trainer.

    It gets a number of items where `has_count` says so.

    Returns:
        Weighted loss, and what the model gave if `compute_loss` takes metrics of it.
    """
    recording = Recording(model, trainer.args)
    num_items = batch["num_items"] if has_count else None
    inputs = batch["inputs"]
    loss, has_metrics = computed(trainer, recording, inputs, num_items)
    note_outputs(trainer, recording.outputs)
    loss = loss * batch["weight"]
    scaler = trainer.accelerator.scaler  # with fp16
    model.backward(loss if scaler is None else scaler.scale(loss))
    return loss.detach(), recording.outputs if has_metrics else []


@mpxla.step(non_split_inputs=["trainer", "has_count", "ignored", "with_names"])
def evaluate(
    model: Any,
    trainer: Any,
    batch: Any,
    has_count: bool,
    ignored: tuple[str, ...] | None,
    with_names: bool = False,
) -> Any:
    """Forward with a loss, as in `train`.

    Outputs of the names in `ignored` are not returned; if it is None, none are. They are a tuple,
    or all that are tensors by their names, if `with_names`.

    Returns:
        Weighted losses, the outputs, and what the model gave if `compute_loss` takes metrics of it.
    """
    recording = Recording(model, trainer.args)
    num_items, outputs = batch["num_items"] if has_count else None, ()
    found, has_metrics = computed(
        trainer,
        recording,
        batch["inputs"],
        num_items,
        **({} if ignored is None else {"return_outputs": True}),
    )
    note_outputs(trainer, recording.outputs)
    loss = found
    if ignored is not None:
        loss, found = found
        is_named = isinstance(found, dict)
        outputs = picked(found, (*ignored, "loss")) if is_named else tuple(found[1:])
        if is_named and with_names:
            outputs = {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}
    weight = batch["weight"]
    loss = torch.where(weight > 0, loss.detach().mean() * weight, torch.zeros_like(weight))
    return loss, outputs, recording.outputs if has_metrics else []


@mpxla.step(non_split_inputs=["trainer", "ignored"])
def predict(model: Any, trainer: Any, batch: Any, ignored: tuple[str, ...]) -> Any:
    """Forward without a loss. Returns the outputs."""
    outputs = Recording(model, trainer.args)(**batch["inputs"])
    return picked(outputs, ignored) if isinstance(outputs, dict) else outputs


def picked(outputs: dict[str, Any], ignored: tuple[str, ...]) -> tuple[Any, ...]:
    """The outputs that `Trainer` returns as predictions."""
    return tuple(value for name, value in outputs.items() if name not in ignored)
