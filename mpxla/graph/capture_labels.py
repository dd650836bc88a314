"""Losses of transformers that leave out samples without a label, with static shapes.

DeBERTa's classifiers gather the samples whose label is not negative, whose number depends on
values. While a step is captured they count nothing in place of being left out: the loss and its
gradients are the same. This module must not import transformers.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F

from mpxla.graph.exchanged import exchanged

__all__ = ["unlabelled_samples_counted"]

_CLASSIFIERS = {
    "transformers.models.deberta.modeling_deberta": "DebertaForSequenceClassification",
    "transformers.models.deberta_v2.modeling_deberta_v2": "DebertaV2ForSequenceClassification",
}


@contextlib.contextmanager
def unlabelled_samples_counted() -> Generator[None]:
    """Exchanges the forwards of such classifiers; undone on exit."""
    with contextlib.ExitStack() as changed:
        for module, name in _CLASSIFIERS.items():
            if module in sys.modules:
                kind = getattr(sys.modules[module], name)
                changed.enter_context(exchanged(kind, forward=_with_static_loss(kind.forward)))
        yield


def _with_static_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        labels = bound.arguments.get("labels")
        is_chosen = self.config.problem_type is None and self.num_labels > 1
        if labels is None or not is_chosen or (labels.dim() > 1 and labels.size(-1) > 1):
            return original(self, *args, **kwargs)
        bound.arguments["labels"] = None
        output = original(*bound.args, **bound.kwargs)
        is_tuple = isinstance(output, tuple)
        loss = _loss(output[0] if is_tuple else output.logits, labels)
        return (loss, *output) if is_tuple else type(output)(**{**output, "loss": loss})

    return forward


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the samples with a label; zero where none has one."""
    labels = labels.reshape(-1).long()
    known = torch.where(labels >= 0, labels, -100)
    total = F.cross_entropy(logits.float(), known, ignore_index=-100, reduction="sum")
    return total / (labels >= 0).sum().clamp(min=1)
