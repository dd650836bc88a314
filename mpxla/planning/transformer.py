"""Parameters and operations of a decoder-only transformer, from its sizes alone.

Legend: h hidden, f ffn, s sequence length, V vocabulary, L layers, k width of keys and of values.
Products with weights take 2 operations per weight and token; scores and their product with the
values take 2 s h each, as if no position were masked (the convention of Megatron-LM's papers).
"""

from dataclasses import dataclass

__all__ = ["Transformer"]


@dataclass(frozen=True)
class Transformer:
    """A model.

    Attributes:
        name: for people.
        layers: transformer blocks.
        hidden: width of the residual stream.
        heads: attention heads.
        kv_heads: heads of keys and values; fewer than `heads` with grouped queries.
        ffn: width of the feed-forward part.
        vocab: rows of the embedding.
        sequence_length: tokens of a sequence.
        global_batch: sequences of a step.
        gated_ffn: three matrices (SwiGLU) instead of two.
        tied_embeddings: the head is the embedding.
        biases: linear layers and norms have them.
        learned_positions: a table of positions.
        dropout: after attention and feed-forward part, and on the scores.
        flash_attention: scores are never in memory, and masked ones not computed.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence_length: int
    global_batch: int
    gated_ffn: bool = False
    tied_embeddings: bool = False
    biases: bool = False
    learned_positions: bool = False
    dropout: bool = False
    flash_attention: bool = False

    @property
    def kv_width(self) -> int:
        """Width of the keys of a token, and of its values."""
        return self.hidden * self.kv_heads // self.heads

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of a layer: 2 h h + 2 h k + (2 or 3) h f."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        return attention + (2 + self.gated_ffn) * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> int:
        """The same with two norms and biases."""
        norms = 2 * self.hidden * (1 + self.biases)
        biases = 3 * self.hidden + 2 * self.kv_width + (1 + self.gated_ffn) * self.ffn
        return self.layer_weights + norms + biases * self.biases

    @property
    def head_weights(self) -> int:
        """Weights of the product that gives the logits."""
        return self.vocab * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Tables of tokens and positions."""
        positions = self.sequence_length * self.hidden * self.learned_positions
        return self.head_weights + positions

    @property
    def parameters(self) -> int:
        """Parameters of the model; a tied table counts once."""
        head = 0 if self.tied_embeddings else self.head_weights
        final_norm = self.hidden * (1 + self.biases)
        return self.layers * self.layer_parameters + self.embedding_parameters + head + final_norm

    @property
    def attention_flops(self) -> int:
        """Forward operations per token and layer of scores and of their product with values."""
        return 4 * self.sequence_length * self.hidden

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6 per weight in a product, and 12 L s h for attention."""
        weights = self.layers * self.layer_weights + self.head_weights
        return 6 * weights + 3 * self.layers * self.attention_flops
