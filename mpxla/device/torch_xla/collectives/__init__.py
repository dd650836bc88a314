"""Collectives of torch_xla: in programs, and by the names of torch and torch_xla."""
