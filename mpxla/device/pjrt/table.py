"""The table: operator of PyTorch -> jax function.

A function takes the operator's arguments: arrays in place of tensors, numbers, lists and dtypes as
PyTorch has them. Options that say where a tensor lies are left out. A result may have another dtype
than PyTorch gives it: the caller casts it. Composite operators come apart (`graphs.py`) and need no
function, except where PyTorch composes them with writes.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

__all__ = ["FUNCTIONS", "IGNORED", "RANDOM", "implements", "operator_of", "random"]

Function = TypeVar("Function", bound=Callable[..., Any])

FUNCTIONS: dict[OpOverload, Callable[..., Any]] = {}
"""Operators without random numbers."""

RANDOM: dict[OpOverload, Callable[..., Any]] = {}
"""Operators that draw random numbers; their functions take a key of jax's before all else."""

IGNORED = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "generator")
"""Keywords that say where and how a tensor lies, which is not the program's business."""


def operator_of(name: str) -> OpOverload | None:
    """An operator by name, such as `add.Tensor` or `relu`; None if this PyTorch has none."""
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return getattr(found, overload or "default", None)


def _register(
    table: dict[OpOverload, Callable[..., Any]], names: tuple[str, ...]
) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        for name in names:
            operator = operator_of(name)
            if operator is None:
                raise LookupError(f"PyTorch {torch.__version__} has no operator aten::{name}")
            if operator in FUNCTIONS or operator in RANDOM:
                raise ValueError(f"two functions for aten::{name}")
            table[operator] = function
        return function

    return register


def implements(*names: str) -> Callable[[Function], Function]:
    """Puts a function into the table."""
    return _register(FUNCTIONS, names)


def random(*names: str) -> Callable[[Function], Function]:
    """Puts a function that takes a key into the table."""
    return _register(RANDOM, names)
