"""Who this process is, for libraries that ask the environment or the device before `smp.init`.

transformers' `is_main_process` asks torch_xla, whose CPU client knows one process until mpxla has
told it of the others; other libraries read torchrun's variables, which mpirun does not set.
"""

import contextlib
from collections.abc import Generator

import mpxla
from mpxla.compat.devices import device_backend
from mpxla.env import LaunchEnv, set_variables

__all__ = ["ranks_told"]


@contextlib.contextmanager
def ranks_told(env: LaunchEnv) -> Generator[None]:
    """Until exit, torchrun's variables are there, and the device's runtime tells the job's rank."""
    before = set_variables(_variables(env))
    undo = device_backend().tell_rank(env.rank, mpxla.is_initialized)
    try:
        yield
    finally:
        undo()
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
