"""Collectives of `torch.distributed` on tensors of the XLA device.

`smp.init` makes gloo groups, which know host tensors. Scripts written for NCCL pass them device
tensors: those go over the host. NCCL as the name of a backend becomes gloo.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from mpxla.compat.views import View, show

__all__ = ["collectives_on_device"]

_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single"),
    *("broadcast", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "send"),
)
_GROUP_MAKERS = ("init_process_group", "new_group")
_DEVICE_BACKENDS = ("nccl", "smddp")


@contextlib.contextmanager
def collectives_on_device() -> Generator[None]:
    """Lets the script's code call collectives with device tensors, until exit."""
    replacements: dict[str, Any] = {name: _over_host(getattr(dist, name)) for name in _COLLECTIVES}
    replacements |= {name: _with_gloo(getattr(dist, name)) for name in _GROUP_MAKERS}
    replacements["barrier"] = _barrier
    with show(dist, View(replacements)), show(c10d, View(replacements)):
        yield


def _over_host(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        args = tuple(_to_host(value, staged) for value in args)
        kwargs = {name: _to_host(value, staged) for name, value in kwargs.items()}
        result = collective(*args, **kwargs)
        if isinstance(result, dist.Work) and staged:
            return _StagedWork(result, staged)
        _copy_back(staged)
        return result

    return call


def _to_host(value: Any, staged: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "xla":
        host = value.detach().cpu()
        staged.append((value, host))
        return host
    if isinstance(value, (list, tuple)):
        return [_to_host(item, staged) for item in value]
    return value


def _copy_back(staged: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for device, host in staged:
            device.copy_(host)


class _StagedWork:
    """An asynchronous collective whose results still have to go to the device."""

    def __init__(self, work: dist.Work, staged: list[tuple[torch.Tensor, torch.Tensor]]):
        self._work = work
        self._staged = staged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any) -> bool:
        """Waits, and brings results to the device."""
        done = self._work.wait(*args)
        _copy_back(self._staged)
        self._staged.clear()
        return done


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
