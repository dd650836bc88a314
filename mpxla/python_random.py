"""States of the generators of Python and NumPy, which a script may have seeded."""

import contextlib
import random
from collections.abc import Generator
from typing import Any

import numpy as np

__all__ = ["python_random_kept", "random_python"]


def random_python() -> Any:
    """States of Python's and NumPy's generators, comparable."""
    state: Any = np.random.get_state()  # of the old form, a tuple
    kind, key, *rest = state
    return random.getstate(), (kind, key.tobytes(), *rest)


@contextlib.contextmanager
def python_random_kept() -> Generator[None]:
    """Whatever is drawn meanwhile, those generators are afterwards as they were."""
    (python, (kind, key, *rest)) = random_python()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state((kind, np.frombuffer(key, dtype=np.uint32), *rest))
