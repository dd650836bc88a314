"""What making graphs leaves behind: garbage in cycles, and free memory that the process keeps."""

import contextlib
import ctypes
import gc
from collections.abc import Generator

__all__ = ["collection_paused", "give_back_memory"]

_MANY = 1_000_000
"""New objects, after which there is one search: a trace makes 100,000 to 400,000."""
_num_unsearched = 0
_num_due = 0
_is_frozen = False
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone


@contextlib.contextmanager
def collection_paused() -> Generator[None]:
    """No search for such garbage meanwhile, and afterwards only once in many times.

    Imports and traces make so many objects that stay that Python looks through all there are again
    and again, those of torch and jax too: 0.1 s each time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        global _num_due
        _num_due = 2
        if was_enabled:
            _make_old()
            gc.enable()


def _make_old() -> None:
    """Takes new objects as old ones: else all are searched as soon as another one is made.

    That takes 0.2 s after a trace. Old ones are hardly ever searched: the graphs of steps that are
    traced again and again would fill the memory.
    """
    global _num_unsearched, _is_frozen
    _num_unsearched += gc.get_count()[0]
    if _num_unsearched > _MANY:
        gc.collect()
        _num_unsearched = 0
    elif not _is_frozen:
        # Counting walks through all that is frozen, as slowly as a search: once is enough.
        _is_frozen = gc.get_freeze_count() > 0
        if not _is_frozen:  # else a script has frozen objects, and they stay so
            gc.freeze()
            gc.unfreeze()


def give_back_memory() -> None:
    """Gives the system what graphs and their compilation have freed; later calls do nothing.

    Call it before steps: the first and the second of them still leave much behind. With a GPT of
    17 M on one rank that is a fifth of the resident memory of a process, which buffers would not
    find again.
    """
    global _num_due
    if _num_due and _trim is not None:
        _trim(0)
    _num_due = max(_num_due - 1, 0)
