"""Attention and MLP blocks of `smp.nn`, split by heads and by columns over a tensor-parallel group.

Until `DistributedModel` wraps the model they are ordinary, whole layers. Sizes are those of all
ranks together. In shapes: N samples, S positions, H hidden size. (SMP API reference,
"smp.nn.DistributedAttentionLayer" and "smp.nn.DistributedTransformerOutputLayer".)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mpxla.errors import ConfigError
from mpxla.graph.collectives import vary
from mpxla.nn.layers import DistributedModule, shards_of

__all__ = ["DistributedAttentionLayer", "DistributedTransformerOutputLayer", "FlashAttentionLayer"]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
}


def initialize(module: nn.Module, initializer_range: float, is_normal: bool) -> None:
    """Normal values for the weights of linear layers and embeddings, and zeros for biases."""
    if not is_normal:
        return
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, 0.0, initializer_range)
            if isinstance(part, nn.Linear) and part.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                nn.init.zeros_(part.bias)


class _Block(DistributedModule):
    """A block with a residual around it and norms before and after it."""

    def __init__(
        self, hidden_size: int, dropout: float, epsilon: float, is_pre: bool, is_post: bool
    ):
        super().__init__()
        if not (is_pre or is_post):
            raise ConfigError(
                "pre_layernorm and post_layernorm are both False; at least one of them must be "
                "True."
            )
        self.pre_layernorm = nn.LayerNorm(hidden_size, epsilon) if is_pre else None
        self.layernorm = nn.LayerNorm(hidden_size, epsilon) if is_post else None
        self.dropout = nn.Dropout(dropout)
        self.fp32_residual_addition = False

    def _normed(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.pre_layernorm is None else self.pre_layernorm(value)

    def _added(self, value: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        value = self.dropout(value)
        if self.fp32_residual_addition:
            value = (value.float() + residual.float()).to(residual.dtype)
        else:
            value = value + residual
        return value if self.layernorm is None else self.layernorm(value)


class DistributedAttentionLayer(_Block):
    """Attention, projection, dropout, residual and norms; heads are split over the ranks.

    Args:
        num_attention_heads: heads of all ranks together; a multiple of the number of ranks.
        attention_head_size: channels per head.
        hidden_size: H, width of input and output.
        attention_dropout_prob: dropout of attention probabilities.
        hidden_dropout_prob: dropout of the projection.
        layernorm_epsilon: of the norms.
        initializer_range: standard deviation, with `use_normal_initialization`.
        use_normal_initialization: normal values instead of torch's.
        cross_attention: keys and values are of other states than queries.
        causal_mask_size: longest sequence of causal attention; None for attention to all positions.
        pre_layernorm: a norm of the input.
        post_layernorm: a norm of the output.
        use_alibi: adds a bias that grows with the distance (arXiv:2108.12409).
        alibi_bias_max: exponent of the smallest slope of that bias.
        scale_attention_scores: divides scores by the square root of the head size.

    Raises:
        ConfigError: there is no norm at all.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: int = 8,
        scale_attention_scores: bool = True,
    ):
        super().__init__(
            hidden_size, hidden_dropout_prob, layernorm_epsilon, pre_layernorm, post_layernorm
        )
        width = num_attention_heads * attention_head_size
        self.query, self.key = nn.Linear(hidden_size, width), nn.Linear(hidden_size, width)
        self.value, self.dense = nn.Linear(hidden_size, width), nn.Linear(width, hidden_size)
        self.head_dim = attention_head_size
        self.num_heads = num_attention_heads
        self.cross_attention = cross_attention
        self.causal_mask_size = None if cross_attention else causal_mask_size
        self.attention_dropout_prob = attention_dropout_prob
        self.scale = 1.0 / math.sqrt(attention_head_size) if scale_attention_scores else 1.0
        self.alibi_bias_max = alibi_bias_max if use_alibi else None
        initialize(self, initializer_range, use_normal_initialization)

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Attends.

        Args:
            inputs: (hidden states [N, S, H], additive mask [N, 1, 1, S] or None); with
                `cross_attention` (hidden states [N, S, H], cross states [N, S2, H], additive mask
                [N, 1, 1, S2] or None).

        Returns:
            [N, S, H].
        """
        hidden, others, mask = _unpacked(inputs, self.cross_attention)
        normed = self._normed(hidden)
        source = normed if others is None else others
        query, key, value = (
            layer(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer, states in ((self.query, normed), (self.key, source), (self.value, source))
        )
        dropout = self.attention_dropout_prob if self.training else 0.0
        bias = self._bias(mask, query, key.shape[2])
        attended = functional.scaled_dot_product_attention(
            query, key, value, bias, dropout, scale=self.scale
        )
        return self._added(self.dense(attended.transpose(1, 2).flatten(2)), hidden)

    def _bias(
        self, mask: torch.Tensor | None, query: torch.Tensor, num_keys: int
    ) -> torch.Tensor | None:
        """What is added to scores [N, heads of this rank, S, keys]."""
        count = query.shape[2]
        parts = [] if mask is None else [mask.to(query.dtype)]
        if self.causal_mask_size is not None:
            if count > self.causal_mask_size:
                raise ConfigError(
                    f"a sequence has {count} positions, and causal_mask_size is "
                    f"{self.causal_mask_size}; build the layer with a larger one."
                )
            later = torch.ones(count, num_keys, dtype=torch.bool, device=query.device).triu(1)
            parts.append(dropped(later, query.dtype))
        if self.alibi_bias_max is not None:
            parts.append(self._alibi(query, num_keys, self.alibi_bias_max))
        return sum(parts[1:], parts[0]) if parts else None

    def _alibi(self, query: torch.Tensor, num_keys: int, bias_max: int) -> torch.Tensor:
        shard = shards_of(self.query).get("weight")
        first, size = (0, 1) if shard is None else (shard.index * self.num_heads, shard.size)
        count = self.num_heads * size
        steps = torch.arange(1 + first, 1 + first + self.num_heads, device=query.device)
        slopes = torch.exp2(-bias_max * steps.to(query.dtype) / count)
        if shard is not None:
            slopes = vary(slopes)  # made of the index, of which `check_split_dims` knows nothing
        places = torch.arange(num_keys, device=query.device)
        own = torch.arange(query.shape[2], device=query.device)
        distances = (places[None, :] - own[:, None]).abs().to(query.dtype)
        return -slopes[:, None, None] * distances


def check_tuple(layer: str, inputs: Sequence[Any], names: str) -> None:
    """Checks that a layer was called with one tuple of what `names` lists.

    Raises:
        ConfigError: it was not.
    """
    is_tensor = isinstance(inputs, torch.Tensor)
    if is_tensor or len(inputs) != len(names.split(", ")):
        given = "a tensor" if is_tensor else f"{len(inputs)} values"
        raise ConfigError(f"{layer} got {given}; call it with one tuple ({names}).")


def _unpacked(
    inputs: Sequence[Any], is_cross: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    names = "hidden_states, cross_states, mask" if is_cross else "hidden_states, attention_mask"
    check_tuple("DistributedAttentionLayer", inputs, names)
    hidden, *rest = inputs
    return hidden, rest[0] if is_cross else None, rest[-1]


def dropped(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zero where a mask is False, and a number that no score makes up for where it is True."""
    lowest = torch.finfo(dtype).min / 4  # sums of two of them are still finite
    return mask.to(dtype) * lowest


class DistributedTransformerOutputLayer(_Block):
    """The MLP H -> intermediate -> H, dropout, residual and norms; columns are split over ranks.

    Args:
        hidden_size: H, width of input and output.
        intermediate_size: of all ranks together; a multiple of the number of ranks.
        hidden_dropout_prob: dropout of the result.
        activation: "gelu" or "relu".
        layernorm_epsilon: of the norms.
        initializer_range: standard deviation, with `use_normal_initialization`.
        use_normal_initialization: normal values instead of torch's.
        pre_layernorm: a norm of the input.
        post_layernorm: a norm of the output.
        fp32_residual_addition: adds the residual in float32.

    Raises:
        ConfigError: there is no norm at all, or no such activation.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
    ):
        super().__init__(
            hidden_size, hidden_dropout_prob, layernorm_epsilon, pre_layernorm, post_layernorm
        )
        if activation not in _ACTIVATIONS:
            raise ConfigError(f"activation is {activation!r}; use 'gelu' or 'relu'.")
        self.dense1 = nn.Linear(hidden_size, intermediate_size)
        self.dense2 = nn.Linear(intermediate_size, hidden_size)
        self.activation = activation
        self.fp32_residual_addition = fp32_residual_addition
        initialize(self, initializer_range, use_normal_initialization)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, S, H] -> [N, S, H]."""
        inner = _ACTIVATIONS[self.activation](self.dense1(self._normed(hidden)))
        return self._added(self.dense2(inner), hidden)


class FlashAttentionLayer(nn.Module):
    """Attention over packed queries, keys and values; the device's compiler fuses it.

    Args:
        attention_dropout_prob: dropout of attention probabilities.
        attention_head_size: channels per head; needed with `scale_attention_scores`.
        scale_attention_scores: divides scores by the square root of the head size.
        scale_attn_by_layer_idx: divides scores by `layer_idx + 1`.
        layer_idx: number of the layer.
        scale: of scores, in the place of all that.
        triton_flash_attention: which kernel SMP takes; without effect.
        use_alibi: adds a bias that grows with the distance.

    Raises:
        ConfigError: a size or number that a scale needs is missing.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ):
        super().__init__()
        needs = {
            "attention_head_size": (scale_attention_scores, attention_head_size),
            "layer_idx": (scale_attn_by_layer_idx, layer_idx),
        }
        for name, (is_needed, value) in needs.items():
            if scale is None and is_needed and value is None:
                raise ConfigError(f"FlashAttentionLayer needs {name} for its scale; give it.")
        if scale is None:
            scale = 1.0 / math.sqrt(attention_head_size or 1) if scale_attention_scores else 1.0
            scale /= (layer_idx or 0) + 1 if scale_attn_by_layer_idx else 1
        if use_alibi:
            raise ConfigError(
                "FlashAttentionLayer(use_alibi=True) has the bias in attn_mask of its kernel only; "
                "use smp.nn.DistributedAttentionLayer(use_alibi=True)."
            )
        self.scale, self.attention_dropout_prob = scale, attention_dropout_prob

    def forward(
        self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False
    ) -> torch.Tensor:
        """Attends.

        Args:
            qkv: [N, S, 3, heads, head size].
            attn_mask: additive, [N, 1, 1, S].
            causal: positions see earlier ones only.

        Returns:
            [N, heads, S, head size].
        """
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mask = attn_mask
        if causal and mask is not None:
            later = torch.ones(qkv.shape[1], qkv.shape[1], dtype=torch.bool, device=qkv.device)
            mask = mask.to(qkv.dtype) + dropped(later.triu(1), qkv.dtype)
        dropout = self.attention_dropout_prob if self.training else 0.0
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, causal and mask is None, scale=self.scale
        )
