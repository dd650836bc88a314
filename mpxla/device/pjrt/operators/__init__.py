"""Jax functions of ATen operators, by subject. Importing this package fills the table."""

import importlib
import pkgutil

__all__ = ["SUBJECTS"]

SUBJECTS = tuple(module.name for module in pkgutil.iter_modules(__path__))
"""The files of this package."""
for _name in SUBJECTS:
    importlib.import_module(f"{__name__}.{_name}")
