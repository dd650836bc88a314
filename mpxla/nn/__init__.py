"""Modules whose tensors are split over the ranks of a tensor-parallel group."""
