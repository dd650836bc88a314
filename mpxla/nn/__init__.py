"""Modules whose tensors are split over the ranks of a tensor-parallel group: `smp.nn`."""

from mpxla.nn.modules import DistributedEmbedding, DistributedLinear

__all__ = ["DistributedEmbedding", "DistributedLinear"]
