"""Random states of a process: torch, Python and NumPy on the host, and the device.

The seeds of a step's random operators come from a host generator on the first pipeline rank
(`runtime.seeds`), so these states replay a run. Values are plain data, which loads with
`weights_only`.
"""

import random
from typing import Any

import numpy as np
import torch

from mpxla.device.backend import Backend
from mpxla.runtime.seeds import generator_state, set_generator_state

__all__ = ["get_random_states", "set_random_states", "set_random_states_of_another_rank"]


def get_random_states(backend: Backend) -> dict[str, Any]:
    """The states of this process."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "device": backend.random_state(),
        "steps": generator_state(),
    }


def set_random_states(states: dict[str, Any], backend: Backend) -> None:
    """Puts the generators of this process into earlier states."""
    set_random_states_of_another_rank(states)
    version, keys, cached = states["python"]
    random.setstate((version, tuple(keys), cached))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    backend.set_random_state(states["device"])


def set_random_states_of_another_rank(states: dict[str, Any]) -> None:
    """Takes over what does not belong to one process: torch's host generator and steps' seeds."""
    torch.set_rng_state(states["torch"])
    set_generator_state(states["steps"])
