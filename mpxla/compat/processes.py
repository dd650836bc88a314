"""Who this process is, and what it talks by, for libraries and scripts that take it for CUDA's.

transformers' `is_main_process` asks torch_xla, whose CPU client knows one process until mpxla has
told it of the others; other libraries read torchrun's variables, which mpirun does not set.
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import mpxla
from mpxla.compat.devices import device_backend
from mpxla.compat.patching import View, show
from mpxla.env import LaunchEnv, set_variables

__all__ = ["nccl_means_gloo", "ranks_told"]

_GROUP_MAKERS = ("init_process_group", "new_group")
_DEVICE_BACKENDS = ("nccl", "smddp")


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


@contextlib.contextmanager
def nccl_means_gloo() -> Generator[None]:
    """Lets the script's code name NCCL as the backend of `torch.distributed`, until exit.

    Collectives take device tensors wherever mpxla runs (`Backend.join_world`).
    """
    replacements: dict[str, Any] = {n: _with_gloo(getattr(dist, n)) for n in _GROUP_MAKERS}
    replacements["barrier"] = _barrier
    with show(dist, View(replacements)), show(c10d, View(replacements)):
        yield


def _with_gloo(make_group: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_group)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        args = tuple("gloo" if value in _DEVICE_BACKENDS else value for value in args)
        if kwargs.get("backend") in _DEVICE_BACKENDS:
            kwargs["backend"] = "gloo"
        return make_group(*args, **kwargs)

    return call


def _barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """`dist.barrier`; which device waits is a question of NCCL."""
    return c10d.barrier(group, async_op)
