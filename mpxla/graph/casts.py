"""Graphs hold the casts of `torch.autocast` already: nothing that runs them may add some.

A script may call a step function, or `optimizer.step()`, inside a region of its own.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import torch

__all__ = ["active_autocast", "without_autocast"]


def active_autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """The regions that the caller is in: kind of device, and type."""
    kinds = (kind for kind in ("cpu", "xla", "cuda") if torch.is_autocast_enabled(kind))
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


@contextlib.contextmanager
def without_autocast() -> Generator[None]:
    """Operators compute in the types of their arguments meanwhile."""
    with contextlib.ExitStack() as stack:
        for kind, _ in active_autocast():
            region: Any = torch.autocast(kind, enabled=False)
            stack.enter_context(region)
        yield
