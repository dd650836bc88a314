"""Which part of a tensor a rank of a tensor-parallel group has.

    whole [6, 4], dim 0, 2 ranks               with 3 blocks (q, k, v in one product)
        rank 0: rows 0 1 2                         rank 0: rows 0 2 4
        rank 1: rows 3 4 5                         rank 1: rows 1 3 5

This module must not know modules or ranks of the job.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Shard"]


@dataclass(frozen=True)
class Shard:
    """One rank's part of a tensor.

    Attributes:
        whole: shape of the whole tensor.
        dim: the dim that is split.
        index: the rank's place in its group.
        size: ranks of the group; every block of the dim is a multiple of it.
        blocks: equal blocks along the dim, each of which is split.
    """

    whole: tuple[int, ...]
    dim: int
    index: int
    size: int
    blocks: int = 1

    @property
    def place(self) -> tuple[int, int, int, int]:
        """(dim, index, size, blocks), which tell parts of one tensor apart."""
        return self.dim, self.index, self.size, self.blocks

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(s // self.size if d == self.dim else s for d, s in enumerate(self.whole))

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the part of a whole tensor."""
        parts = tensor.unflatten(self.dim, (self.blocks, self.size, -1))
        own = parts.select(self.dim + 1, self.index).flatten(self.dim, self.dim + 1)
        return own.clone(memory_format=torch.contiguous_format)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor of the parts of all ranks, in the order of the group."""
        blocks = [part.unflatten(self.dim, (self.blocks, -1)) for part in parts]
        return torch.cat(blocks, self.dim + 1).flatten(self.dim, self.dim + 1)
