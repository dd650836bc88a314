"""Routed experts of transformers, with shapes that no values decide, while a step is captured.

The library groups tokens by the expert that they are routed to, so that values say how many rows an
expert gets. Here every expert computes all tokens, and the routing weights, zero where a token does
not go, decide what counts. The sum and its gradients are those of the grouped form; an expert that
gets no token has a gradient of zeros. The cost is that of all experts for all tokens.

This module must not import transformers: nothing is to be done where the user has not.
"""

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

from mpxla.graph.exchanged import exchanged

__all__ = ["static_transformers"]

_INTERFACE = "transformers.integrations.moe"
_GROUPING = ("eager", "batched_mm", "deepgemm", "grouped_mm", "sonicmoe", None)
"""Implementations that are exchanged; one that the user has registered stays."""
_MODELS = "transformers.models"
_LISTS = (
    f"{_MODELS}.switch_transformers.modeling_switch_transformers.SwitchTransformersExperts",
    f"{_MODELS}.nllb_moe.modeling_nllb_moe.NllbMoeExperts",
)
"""Classes whose experts are modules of their own."""


@contextlib.contextmanager
def static_transformers() -> Generator[None]:
    """Exchanges the methods of the library that do so; undone on exit."""
    with contextlib.ExitStack() as changed:
        if _INTERFACE in sys.modules:
            kind = sys.modules[_INTERFACE].ExpertsInterface
            replaced = _interface(kind.get_interface)
            changed.enter_context(exchanged(kind, get_interface=replaced))
        for path in _LISTS:
            module, _, name = path.rpartition(".")
            if module in sys.modules:
                kind = getattr(sys.modules[module], name)
                changed.enter_context(exchanged(kind, forward=_run_list))
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
