"""How many programs jax has found on disk, and how many it has compiled and put there."""

import contextlib
from collections import Counter

import jax

__all__ = ["counted"]


@contextlib.contextmanager
def counted():
    """Counts "hits" and "misses" of jax's cache, the small programs that it makes by itself too."""
    counts = Counter()

    def note(event, **_):
        counts[event.removeprefix("/jax/compilation_cache/cache_")] += 1

    jax.monitoring.register_event_listener(note)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_listener(note)
