"""Where the seeds of random operators in step functions come from.

Usually torch's host generator, so that `torch.manual_seed` replays a run. Programs that seed their
device separately (as CUDA's names allow) can name a generator of their own.
"""

import torch

__all__ = ["draw_seed", "generator_state", "set_generator_state", "use_generator"]

_generator: torch.Generator | None = None


def use_generator(generator: torch.Generator | None) -> None:
    """Makes later steps draw from this host generator; None: from torch's default one."""
    global _generator
    _generator = generator


def draw_seed() -> int:
    """The next seed, below 2 ** 62."""
    return int(torch.randint(1 << 62, (1,), generator=_generator).item())


def generator_state() -> torch.Tensor | None:
    """State of the generator that a program has named; None where it is torch's default one."""
    return None if _generator is None else _generator.get_state()


def set_generator_state(state: torch.Tensor | None) -> None:
    """Puts the named generator, if there is one, into an earlier state, if there is one."""
    if _generator is not None and state is not None:
        _generator.set_state(state)
