"""States of generators of random numbers, those of this process and those of a script.

All as plain data, which can be compared and travel.
"""

import contextlib
import random
from collections.abc import Generator, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.utils._pytree as pytree

__all__ = [
    "OF_PROCESS",
    "OF_PYTHON",
    "States",
    "random_kept",
    "set_states",
    "state_of",
    "states_of",
]

States = tuple[Any, ...]
OF_PYTHON: States = tuple(cast(Any, f).__self__ for f in (random.getstate, np.random.get_state))
"""The generators of the modules `random` and `numpy.random`."""
OF_PROCESS = (*OF_PYTHON, torch.default_generator)


def state_of(generator: Any) -> Any:
    """The state of a generator of Python, PyTorch or NumPy, of both its kinds."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    is_old = isinstance(generator, np.random.RandomState)
    state = generator.get_state(legacy=False) if is_old else generator.bit_generator.state
    return pytree.tree_map_only(np.ndarray, np.ndarray.tolist, state)


def states_of(generators: Iterable[Any]) -> States:
    """The states of several."""
    return tuple(map(state_of, generators))


def set_states(generators: Iterable[Any], states: Iterable[Any]) -> None:
    """Puts generators into these states, which others of their kinds may have had."""
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, torch.Generator):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state


@contextlib.contextmanager
def random_kept(generators: Sequence[Any] = OF_PROCESS) -> Generator[None]:
    """Whatever is drawn meanwhile, generators are afterwards as they were."""
    before = states_of(generators)
    try:
        yield
    finally:
        set_states(generators, before)
