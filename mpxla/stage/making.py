"""What Python and torch do beside while graphs are made, and need not."""

import contextlib
import gc
from collections.abc import Generator

from torch.fx._lazy_graph_module import (
    _use_lazy_graph_module,  # pyright: ignore[reportPrivateUsage]
)

__all__ = ["graphs_made_quickly"]


@contextlib.contextmanager
def graphs_made_quickly() -> Generator[None]:
    """No search for garbage in cycles meanwhile, and no Python code for graphs that nobody calls.

    Tracing makes so many objects that Python looks through all there are several times, those of
    torch and jax too: a quarter of the time to the first step of a small GPT. Code takes a tenth of
    the rest, and most graphs become programs without it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        if was_enabled:
            gc.enable()
