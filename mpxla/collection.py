"""Python's search for garbage in cycles, where it finds none and costs much."""

import contextlib
import gc
from collections.abc import Generator

__all__ = ["collection_paused"]


@contextlib.contextmanager
def collection_paused() -> Generator[None]:
    """No such search meanwhile.

    Imports and traces make so many objects that stay that Python looks through all there are again
    and again, those of torch and jax too: 0.1 s each time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
