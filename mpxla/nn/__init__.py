"""Modules whose tensors are split over the ranks of a tensor-parallel group: `smp.nn`."""

from mpxla.nn.attention import (
    DistributedAttentionLayer,
    DistributedTransformerOutputLayer,
    FlashAttentionLayer,
)
from mpxla.nn.layers import DistributedModule
from mpxla.nn.modules import DistributedEmbedding, DistributedLinear
from mpxla.nn.transformer import (
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
)

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
]
