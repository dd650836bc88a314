"""Which elements of a parameter a rank of a sharding group holds.

    whole [3, 3], 2 ranks, flattened     | 0 1 2 3 4 | 5 6 7 8 _ |
        rank 0 holds elements 0 to 5, rank 1 holds 5 to 9; both travel as 5 elements

This module must not know ranks of the job, nor how parts travel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from mpxla.stage.spec import TensorSpec

__all__ = ["SHARDING_GROUP", "FlatShard"]

SHARDING_GROUP = "sharding"
"""Name, in stage graphs, of the group of ranks that hold parameters together."""


@dataclass(frozen=True)
class FlatShard:
    """One rank's part of a flattened tensor.

    Attributes:
        whole: shape of the whole tensor.
        index: the rank's place in its group.
        size: ranks of the group.
    """

    whole: tuple[int, ...]
    index: int
    size: int

    @classmethod
    def fits(cls, num_elements: int, size: int) -> bool:
        """Whether every rank would have something of a tensor."""
        return num_elements > (size - 1) * -(-num_elements // size) > 0

    @property
    def num_elements(self) -> int:
        """Of the whole tensor."""
        return prod(self.whole)

    @property
    def length(self) -> int:
        """Elements of every rank's part as it travels: that of the last rank is padded."""
        return -(-self.num_elements // self.size)

    @property
    def extent(self) -> tuple[int, int]:
        """First element and end of the part, in the flattened tensor."""
        start = self.index * self.length
        return start, min(start + self.length, self.num_elements)

    @property
    def num_own(self) -> int:
        """Elements of the part."""
        start, stop = self.extent
        return stop - start

    def spec(self, dtype: torch.dtype) -> TensorSpec:
        """Of the part."""
        return TensorSpec((self.num_own,), dtype)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the part of a whole tensor."""
        return tensor.reshape(-1)[slice(*self.extent)].clone()

    def padded(self, part: torch.Tensor) -> torch.Tensor:
        """A part as it travels."""
        return torch.nn.functional.pad(part, (0, self.length - part.numel()))

    def join(self, parts: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """The whole tensor of all ranks' parts, as they travel, in the order of the group."""
        flat = torch.cat(list(parts))
        return flat[: self.num_elements].view(self.whole)
