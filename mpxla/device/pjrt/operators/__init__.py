"""Jax functions of ATen operators, by subject. Importing this package fills the table.

Jax counts in 64 bits from then on, as PyTorch does.
"""

import importlib
import pkgutil

import jax

__all__ = ["SUBJECTS"]

# Without it jax would make int32 of int64 and float32 of float64, in silence.
jax.config.update("jax_enable_x64", True)

SUBJECTS = tuple(module.name for module in pkgutil.iter_modules(__path__))
"""The files of this package."""
for _name in SUBJECTS:
    importlib.import_module(f"{__name__}.{_name}")
