"""Memory of the host that one program gives back and the next one takes.

XLA's CPU runtime allocates what a call computes, and works with, by `malloc`. By default glibc
gives large parts back to the system at once, whose pages are cleared and mapped anew when the next
call touches them: 1 to 5 % of a step (GPT of 17 M and BERT on one rank of an AMD processor).
"""

import ctypes
import os

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of `mallopt`, in glibc's `malloc.h`."""

_KEPT_BYTES = 2**31 - 1
_MAPPED_BYTES = 2**30
"""Of one allocation, which goes back when it is freed."""


def keep_freed_memory() -> bool:
    """Lets this process keep up to 2 GiB of memory that it has freed.

    Returns:
        Whether it does: not where the environment says how `malloc` is to work, or without glibc.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # of another system
        return False
    options = {_TRIM_THRESHOLD: _KEPT_BYTES, _MMAP_THRESHOLD: _MAPPED_BYTES}
    return all([mallopt(option, value) for option, value in options.items()])
