"""Texts of batches that a loss itself turns into tokens.

Those of sentence-transformers' `CrossEncoderTrainer` do: its batches are lists of texts, and a loss
puts them into pairs for `model.preprocess`. A step function would keep the tokens of the first
batch. So the loss is played on the host before, with made-up scores, for what it asks; the step
gets the tokens as an input, and its stand-in for the model gives them when it is asked.
This module must not know sentence-transformers.
"""

from typing import Any, cast

import torch
import torch.utils._pytree as pytree

from mpxla.compat.huggingface.metrics import TOKENS, Played, in_place_of, shadow_of

__all__ = ["with_tokens"]


class _Scoring(Played):
    """Tokenizes, and gives made-up scores."""

    def __init__(self, model: Any):
        super().__init__(model, [])
        self.asked: list[list[Any]] = []
        self.tokens: list[dict[str, Any]] = []

    def preprocess(self, texts: list[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = self._model.preprocess(texts, *args, **kwargs)
        self.asked.append(texts)
        self.tokens.append(dict(found))
        return found

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        num_labels = self._model.num_labels
        return {"scores": torch.zeros(len(self.asked[-1]), num_labels)}


def with_tokens(trainer: Any, inputs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A batch whose texts are gone, with the tokens of them, and whether it cannot be cut.

    It cannot where the rows that the model gets are not those of the batch, one by one.
    """
    names = [name for name, value in inputs.items() if _has_texts(value)]
    if not names or not hasattr(trainer.model, "preprocess"):
        return inputs, False
    model = _Scoring(trainer.model)
    shadow, _ = shadow_of(trainer)
    with torch.no_grad(), in_place_of(trainer.model, model, trainer):
        shadow.compute_loss(model, dict(inputs))
    rows = list(zip(*(inputs[name] for name in names), strict=True))
    is_whole = not all(_are_of(rows, asked) for asked in model.asked)
    # Each has as many rows as before: in a tensor where they are cut with it.
    taken = {name: _blank(inputs[name]) if is_whole else torch.arange(len(rows)) for name in names}
    return {**inputs, **taken, TOKENS: model.tokens}, is_whole


def _are_of(rows: list[Any], asked: list[Any]) -> bool:
    """Whether the first item that is asked is made of the texts of the first row, and so on."""
    return len(asked) == len(rows) and all(
        all(isinstance(text, str) for text in row) and set(pytree.tree_leaves(item)) <= set(row)
        for row, item in zip(rows, asked, strict=True)
    )


def _has_texts(value: Any) -> bool:
    return isinstance(value, list) and any(
        isinstance(item, str) or _has_texts(item) for item in cast(list[Any], value)
    )


def _blank(value: Any) -> Any:
    return [_blank(item) for item in cast(list[Any], value)] if isinstance(value, list) else ""
