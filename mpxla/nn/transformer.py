"""Transformers of `smp.nn`: layers, stacks of them, and a language model.

They are built of `DistributedAttentionLayer` and `DistributedTransformerOutputLayer`, which is all
that is split; the ends of the language model are split by words. In shapes: N samples, S
positions, H hidden size, V words. (SMP API reference, "smp.nn.DistributedTransformerLayer",
"smp.nn.DistributedTransformer", "smp.nn.DistributedTransformerLMHead".)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mpxla.errors import ConfigError
from mpxla.nn.attention import (
    DistributedAttentionLayer,
    DistributedTransformerOutputLayer,
    check_tuple,
    dropped,
    initialize,
)
from mpxla.nn.layers import DistributedModule

__all__ = [
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
]


class DistributedTransformerLayer(DistributedModule):
    """Attention, perhaps cross attention, and an MLP, each with its residual and norms.

    Args:
        num_attention_heads: of all ranks together.
        attention_head_size: channels per head.
        hidden_size: H.
        intermediate_size: width of the MLP, of all ranks together.
        attention_dropout_prob: dropout of attention probabilities.
        hidden_dropout_prob: all other dropouts.
        activation: "gelu" or "relu".
        layernorm_epsilon: of the norms.
        initializer_range: standard deviation, with `use_normal_initialization`.
        use_normal_initialization: normal values instead of torch's.
        causal_mask_size: longest sequence of causal attention; None for attention to all positions.
        add_cross_attention: attention to other states after that to the own ones.
        pre_layernorm: norms of the inputs of blocks.
        post_layernorm: norms of the outputs of blocks.
        use_alibi: see `DistributedAttentionLayer`.
        alibi_bias_max: likewise.
        fp32_residual_addition: adds residuals in float32.
        scale_attention_scores: see `DistributedAttentionLayer`.

    Raises:
        ConfigError: there is no norm at all, or no such activation.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: int = 8,
        fp32_residual_addition: bool = False,
        scale_attention_scores: bool = True,
    ):
        super().__init__()
        common: dict[str, Any] = {
            "hidden_size": hidden_size,
            "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "pre_layernorm": pre_layernorm,
            "post_layernorm": post_layernorm,
        }
        heads: dict[str, Any] = {
            "num_attention_heads": num_attention_heads,
            "attention_head_size": attention_head_size,
            "attention_dropout_prob": attention_dropout_prob,
            "scale_attention_scores": scale_attention_scores,
            **common,
        }
        self.attention = DistributedAttentionLayer(
            causal_mask_size=causal_mask_size,
            use_alibi=use_alibi,
            alibi_bias_max=alibi_bias_max,
            **heads,
        )
        self.cross_attention = None
        if add_cross_attention:
            self.cross_attention = DistributedAttentionLayer(cross_attention=True, **heads)
        self.output = DistributedTransformerOutputLayer(
            intermediate_size=intermediate_size, activation=activation, **common
        )
        for block in (self.attention, self.cross_attention, self.output):
            if block is not None:
                block.fp32_residual_addition = fp32_residual_addition

    def forward(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """A layer.

        Args:
            inputs: (hidden states [N, S, H], additive mask [N, 1, 1, S]); with cross attention
                (hidden states [N, S, H], cross states [N, S2, H], additive mask [N, 1, 1, S],
                additive cross mask [N, 1, 1, S2]). Masks may be None.

        Returns:
            The same with new hidden states.
        """
        if self.cross_attention is None:
            hidden, mask = inputs
            return self.output(self.attention((hidden, mask))), mask
        hidden, others, mask, cross_mask = inputs
        hidden = self.attention((hidden, mask))
        hidden = self.cross_attention((hidden, others, cross_mask))
        return self.output(hidden), others, mask, cross_mask


class DistributedTransformer(DistributedModule):
    """Layers one after the other. With norms before and after blocks, its ends have norms too.

    Args:
        num_layers: how many.
        pre_layernorm: norms of the inputs of blocks.
        post_layernorm: norms of the outputs of blocks.
        hidden_size: H.
        layernorm_epsilon: of the norms.
        **options: as for `DistributedTransformerLayer`.

    Raises:
        ConfigError: there is no norm at all, or no such activation.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **options: Any,
    ):
        super().__init__()
        layers = (
            DistributedTransformerLayer(
                num_attention_heads,
                attention_head_size,
                hidden_size,
                intermediate_size,
                attention_dropout_prob,
                hidden_dropout_prob,
                activation,
                layernorm_epsilon,
                initializer_range,
                use_normal_initialization,
                causal_mask_size,
                add_cross_attention,
                pre_layernorm,
                post_layernorm,
                **options,
            )
            for _ in range(num_layers)
        )
        self.seq_layers = nn.Sequential(*layers)
        has_ends = pre_layernorm and post_layernorm
        self.input_layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon) if has_ends else None
        self.output_layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon) if has_ends else None

    def forward(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Inputs and results are those of `DistributedTransformerLayer`."""
        hidden, *rest = inputs
        if self.input_layernorm is not None:
            hidden = self.input_layernorm(hidden)
        hidden, *rest = self.seq_layers((hidden, *rest))
        if self.output_layernorm is not None:
            hidden = self.output_layernorm(hidden)
        return (hidden, *rest)


class DistributedTransformerLMHead(DistributedModule):
    """Embeddings, a `DistributedTransformer`, and a head that is tied to the word embedding.

    With norms before blocks only, a norm follows the last layer (as in GPT-2); with norms after
    blocks only, one follows the embeddings (as in BERT).

    Args:
        vocab_size: V; a multiple of the number of ranks, or the ends stay whole.
        num_positions: longest sequence.
        num_token_types: kinds of tokens; 0 for none.
        add_lm_head: without it, results are hidden states.
        **options: as for `DistributedTransformer`.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **options: Any,
    ):
        super().__init__()
        self.word_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(num_positions, hidden_size)
        self.token_type_embedding = (
            nn.Embedding(num_token_types, hidden_size) if num_token_types else None
        )
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.transformer = DistributedTransformer(
            num_layers,
            num_attention_heads,
            attention_head_size,
            hidden_size,
            intermediate_size,
            attention_dropout_prob,
            hidden_dropout_prob,
            activation,
            layernorm_epsilon,
            initializer_range,
            use_normal_initialization,
            causal_mask_size,
            add_cross_attention,
            pre_layernorm,
            post_layernorm,
            **options,
        )
        self.is_causal = causal_mask_size is not None
        self.is_cross = add_cross_attention
        self.norms_last = pre_layernorm
        has_norm = pre_layernorm != post_layernorm
        self.layernorm = nn.LayerNorm(hidden_size, layernorm_epsilon) if has_norm else None
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False) if add_lm_head else None
        for embedding in (self.word_embedding, self.position_embedding, self.token_type_embedding):
            if embedding is not None:
                initialize(embedding, initializer_range, True)
        if self.lm_head is not None:
            self.lm_head.weight = self.word_embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        """The layer that is split by words."""
        return self.word_embedding

    def get_output_embeddings(self) -> nn.Module | None:
        """Likewise, of the other end."""
        return self.lm_head

    def forward(self, inputs: Sequence[Any]) -> torch.Tensor:
        """Hidden states, scores or the loss.

        Args:
            inputs: (words [N, S], attention mask [N, S] with 1 where a position is masked, token
                types [N, S], positions [N, S], labels [N, S]); with cross attention
                (words, attention mask, token types, positions, cross states [N, S2, H], cross mask
                [N, S2], labels). All but the words may be None.

        Returns:
            Without labels, scores [N, S, V] (hidden states [N, S, H] without a head); with labels,
            the mean cross entropy: of the next word in a causal model, else of the word itself.

        Raises:
            ConfigError: the number of inputs is another one, or labels came without a head.
        """
        words, mask, types, positions, *rest = self._checked(inputs)
        labels = rest[-1]
        if positions is None:
            positions = torch.arange(words.shape[1], device=words.device)[None]
        hidden = self.word_embedding(words) + self.position_embedding(positions)
        if self.token_type_embedding is not None and types is not None:
            hidden = hidden + self.token_type_embedding(types)
        if self.layernorm is not None and not self.norms_last:
            hidden = self.layernorm(hidden)
        hidden = self.dropout(hidden)
        masks = [  # [N, S] with 1 where a position is masked
            None if m is None else dropped(m[:, None, None, :], hidden.dtype)
            for m in (mask, *(rest[1:2] if self.is_cross else ()))
        ]
        states = (hidden, *rest[:1], *masks) if self.is_cross else (hidden, *masks)
        hidden = self.transformer(states)[0]
        if self.layernorm is not None and self.norms_last:
            hidden = self.layernorm(hidden)
        if self.lm_head is None:
            return hidden
        scores = self.lm_head(hidden)
        if labels is None:
            return scores
        if self.is_causal:
            scores, labels = scores[:, :-1], labels[:, 1:]
        return functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())

    def _checked(self, inputs: Sequence[Any]) -> Sequence[Any]:
        names = "words, attention_mask, token_type_ids, position_ids, "
        names += "cross_states, cross_mask, labels" if self.is_cross else "labels"
        check_tuple("DistributedTransformerLMHead", inputs, names)
        if inputs[-1] is not None and self.lm_head is None:
            raise ConfigError(
                "DistributedTransformerLMHead got labels and has no head; build it with "
                "add_lm_head=True, or pass None for them."
            )
        return inputs
