"""Layers that scripts put into their models themselves: `smp.nn.DistributedLinear` and others.

Until `DistributedModel` wraps the model they are the ordinary layers, whole, with values of their
own; then every rank of a tensor-parallel group keeps its part. They take values that are equal on
all ranks and give such values.
"""

import torch
from torch import nn
from torch.nn import functional

from mpxla.graph.collectives import gather_parts, sum_over, vary
from mpxla.nn.layers import DistributedModule, shards_of

__all__ = ["DistributedEmbedding", "DistributedLinear"]


class DistributedLinear(DistributedModule, nn.Linear):
    """`nn.Linear` split over its input channels; results are summed over the ranks.

    (SMP API reference, "smp.nn.DistributedLinear".)

    Args:
        in_features: input channels, of all ranks together; a multiple of their number.
        out_features: output channels.
        bias: whether there is one; it stays whole.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__(in_features, out_features, bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        shard = shards_of(self).get("weight")
        if shard is None:
            return super().forward(input)
        own = shard.shape[1]
        # First as a varying value: the gradient of each rank's channels is theirs alone.
        part = vary(input).narrow(-1, shard.index * own, own)
        total = sum_over(functional.linear(part, self.weight))
        has_bias = self.bias is not None  # pyright: ignore[reportUnnecessaryComparison]
        return total + self.bias if has_bias else total


class DistributedEmbedding(DistributedModule, nn.Embedding):
    """`nn.Embedding` whose columns are split; rows are put together on all ranks.

    (SMP API reference, "smp.nn.DistributedEmbedding"; its private arguments are left out.)

    Args:
        num_embeddings: words.
        embedding_dim: columns, of all ranks together; a multiple of their number.
        padding_idx: a word whose row is not trained.
        initializer_range: standard deviation of the values at the start.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        initializer_range: float = 0.02,
    ):
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        with torch.no_grad():
            self.weight.normal_(0.0, initializer_range)
            if padding_idx is not None:
                self.weight[padding_idx].zero_()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Words [...] -> rows [..., embedding_dim]."""
        rows = super().forward(input)
        shard = shards_of(self).get("weight")
        return rows if shard is None else gather_parts(rows, -1, shard.size, shard.index)
