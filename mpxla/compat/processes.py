"""Who this process is, for libraries that ask the environment or torch_xla before `smp.init`.

transformers' `is_main_process` asks torch_xla, whose CPU client knows one process until mpxla has
told it of the others; other libraries read torchrun's variables, which mpirun does not set.
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch_xla.runtime as xr

import mpxla
from mpxla.env import LaunchEnv, set_variables

__all__ = ["ranks_told"]


@contextlib.contextmanager
def ranks_told(env: LaunchEnv) -> Generator[None]:
    """Until exit, torchrun's variables are there, and torch_xla's rank is that of the job.

    Args:
        env: of this process.
    """
    before = set_variables(_variables(env))
    original = xr.global_ordinal
    if env.pjrt_device == "CPU":  # other clients know better
        # Not the number of processes: mpxla itself asks the client for that in `smp.init`.
        xr.global_ordinal = _before_init(original, env.rank)
    try:
        yield
    finally:
        xr.global_ordinal = original
        set_variables(before)


def _variables(env: LaunchEnv) -> dict[str, str | None]:
    if env.source != "mpirun":
        return {}
    return {
        "RANK": str(env.rank),
        "WORLD_SIZE": str(env.world_size),
        "LOCAL_RANK": str(env.local_rank),
        "LOCAL_WORLD_SIZE": str(env.local_size),
        "MASTER_ADDR": env.master_addr,
        "MASTER_PORT": str(env.master_port),
    }


def _before_init(original: Callable[[], int], value: int) -> Callable[[], int]:
    @functools.wraps(original)
    def read(*args: Any) -> int:
        return original(*args) if mpxla.is_initialized() else value

    return read
