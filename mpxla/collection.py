"""Python's search for garbage in cycles, where it finds none and costs much."""

import contextlib
import gc
from collections.abc import Generator

__all__ = ["collection_paused"]


@contextlib.contextmanager
def collection_paused() -> Generator[None]:
    """No such search meanwhile, nor at once afterwards.

    Imports and traces make so many objects that stay that Python looks through all there are again
    and again, those of torch and jax too: 0.1 s each time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else a script has frozen objects, and they stay so
                # Makes the new objects old ones. As young ones, all of them would be searched as
                # soon as another one is made: 0.2 s after a trace.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
