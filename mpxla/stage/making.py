"""What Python and torch do beside while graphs are made, and need not."""

import contextlib
from collections.abc import Generator

from torch.fx._lazy_graph_module import (
    _use_lazy_graph_module,  # pyright: ignore[reportPrivateUsage]
)

from mpxla.collection import collection_paused

__all__ = ["graphs_made_quickly"]


@contextlib.contextmanager
def graphs_made_quickly() -> Generator[None]:
    """No search for garbage in cycles meanwhile, and no Python code for graphs that nobody calls.

    The search takes a quarter of the time to the first step of a small GPT. Code takes a tenth of
    the rest, and most graphs become programs without it.
    """
    with collection_paused(), _use_lazy_graph_module(True):
        yield
