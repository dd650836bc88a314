"""SMP's checkpoint functions, at the path that its reference gives."""

from mpxla.parallel.checkpointing import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
