"""Parts of transformers whose shapes depend on values, with static ones while a step is captured.

*Routed experts*: the library groups tokens by the expert that they are routed to, so that values
say how many rows an expert gets. Here every expert computes all tokens, and the routing weights,
zero where a token does not go, decide what counts. The sum and its gradients are those of the
grouped form; an expert that gets no token has a gradient of zeros. The cost is that of all experts
for all tokens.

*Samples without a label*: DeBERTa's classifiers gather the samples whose label is not negative.
Here the others count nothing: the loss and its gradients are the same.

This module must not import transformers: nothing is to be done where the user has not.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mpxla.graph.exchanged import exchanged

__all__ = ["static_transformers"]

_INTERFACE = "transformers.integrations.moe"
_GROUPING = ("eager", "batched_mm", "deepgemm", "grouped_mm", "sonicmoe", None)
"""Implementations that are exchanged; one that the user has registered stays."""


@contextlib.contextmanager
def static_transformers() -> Generator[None]:
    """Exchanges the methods of the library that do so; undone on exit."""
    with contextlib.ExitStack() as changed:
        if _INTERFACE in sys.modules:
            kind = sys.modules[_INTERFACE].ExpertsInterface
            replaced = _interface(kind.get_interface)
            changed.enter_context(exchanged(kind, get_interface=replaced))
        for path, replacement in _FORWARDS.items():
            module, _, name = path.rpartition(".")
            if module in sys.modules:
                kind = getattr(sys.modules[module], name)
                changed.enter_context(exchanged(kind, forward=replacement(kind.forward)))
        yield


def _interface(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(interface: Any, implementation: Any, default: Any) -> Any:
        if implementation in _GROUPING:
            return _run_stacked
        return original(interface, implementation, default)

    return get_interface


def _run_stacked(experts: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Experts whose weights are stacked; `use_experts_implementation` says how.

    Args:
        experts: the module.
        args: tokens `[T, H]`, and of every token the chosen experts `[T, K]` and weights `[T, K]`.
        kwargs: those given by name, in the same order.
    """
    tokens, chosen, weights = (*args, *kwargs.values())
    share = _share(chosen, weights, experts.num_experts)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    hidden = _linear(experts, name, tokens.expand(experts.num_experts, *tokens.shape))
    hidden = hidden.flatten(0, 1)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    result = _linear(experts, "down_proj", hidden.unflatten(0, (experts.num_experts, -1)))
    if experts.has_post_expert_norm:
        result = experts.post_expert_norm(result.flatten(0, 1)).unflatten(0, result.shape[:2])
    return (result * share.unsqueeze(-1)).sum(dim=0).to(tokens.dtype)


def _share(chosen: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Weight of every expert for every token `[E, T]`; indices beyond the experts count nothing."""
    numbers = torch.arange(num_experts, device=chosen.device).reshape(-1, 1, 1)
    return torch.where(chosen == numbers, weights, torch.zeros_like(weights)).sum(dim=-1)


def _linear(experts: Any, name: str, tokens: torch.Tensor) -> torch.Tensor:
    """`[E, T, I]` times the weights of every expert."""
    weight = getattr(experts, name)
    result = torch.bmm(tokens, weight if experts.is_transposed else weight.transpose(1, 2))
    return result + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else result


def _run_list(
    experts: nn.ModuleDict, tokens: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Experts that are modules of their own.

    Args:
        experts: the modules, in order, with `num_experts`.
        tokens: `[T, H]`.
        routing: of every token the chosen experts `[T, K]`, or a mask of them `[T, K, E]`.
        weights: of the choices `[T, K]`.
    """
    count = int(experts.num_experts)  # pyright: ignore[reportArgumentType]
    mask = routing if routing.dim() == 3 else nn.functional.one_hot(routing, count)
    drop = getattr(experts, "moe_token_dropout", 0.0)
    result = torch.zeros_like(tokens)
    for number, expert in enumerate(experts.values()):
        if number == count:  # modules after the experts, such as a dropout
            break
        share = torch.where(mask[..., number] > 0, weights, torch.zeros_like(weights)).sum(dim=-1)
        part = expert(tokens) * share.unsqueeze(-1)
        if drop > 0:
            dropout: Any = experts.token_dropout
            part = dropout(part) if experts.training else part * (1 - drop)
        result = result + part.to(tokens.dtype)
    return result


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


_MODELS = "transformers.models"
_FORWARDS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    f"{_MODELS}.switch_transformers.modeling_switch_transformers.SwitchTransformersExperts": (
        lambda _: _run_list
    ),
    f"{_MODELS}.nllb_moe.modeling_nllb_moe.NllbMoeExperts": lambda _: _run_list,
    f"{_MODELS}.deberta.modeling_deberta.DebertaForSequenceClassification": _with_static_loss,
    f"{_MODELS}.deberta_v2.modeling_deberta_v2.DebertaV2ForSequenceClassification": (
        _with_static_loss
    ),
}
"""Class -> what makes its forward of the library's."""
