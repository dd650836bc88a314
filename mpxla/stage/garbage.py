"""Python's search for garbage in cycles, which waits while graphs are made."""

import contextlib
import gc
from collections.abc import Generator

__all__ = ["collection_paused"]


@contextlib.contextmanager
def collection_paused() -> Generator[None]:
    """No search for cycles meanwhile.

    Tracing makes so many objects that Python looks through all there are several times, those of
    torch and jax too: a quarter of the time to the first step of a small GPT.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
