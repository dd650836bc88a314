"""Checkpoints: SMP's save and load functions, and folders that reload on any topology."""
