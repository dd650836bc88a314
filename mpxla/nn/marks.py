"""Marks on modules, put on them when they are created; the innermost block wins.

`smp.partition` and `smp.tensor_parallelism` say something about the modules that are built inside
of them, before any session exists; so what they say lives on the modules themselves.
"""

import contextlib
from collections.abc import Generator
from typing import Any

from torch import nn

__all__ = ["marking"]

_blocks: list[tuple[str, Any]] = []
_original_init = nn.Module.__init__


@contextlib.contextmanager
def marking(key: str, value: Any) -> Generator[None]:
    """Gives every module that is created inside an attribute."""
    _blocks.append((key, value))
    nn.Module.__init__ = _marking_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        _blocks.pop()
        if not _blocks:
            nn.Module.__init__ = _original_init  # type: ignore[method-assign]


def _marking_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    _original_init(self, *args, **kwargs)
    self.__dict__.update(_blocks)
