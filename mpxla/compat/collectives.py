"""NCCL as the name of a backend of `torch.distributed` becomes gloo.

Collectives take device tensors wherever mpxla runs (`Backend.join_world`).
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from mpxla.compat.views import View, show

__all__ = ["nccl_means_gloo"]

_GROUP_MAKERS = ("init_process_group", "new_group")
_DEVICE_BACKENDS = ("nccl", "smddp")


@contextlib.contextmanager
def nccl_means_gloo() -> Generator[None]:
    """Lets the script's code name NCCL, until exit."""
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
