"""`torch.distributed` on tensors of the XLA device: its collectives go over the host.

The process groups that `smp.init` makes are gloo's, which knows host tensors only. Torch has no
kernel for its collective operators on XLA tensors, so torch_xla's fallback runs them on copies and
drops what they wrote. The kernels here copy the results back. They are registered with torch's
dispatcher, so it does not matter how or when a script imported a collective.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor

from mpxla.errors import MpxlaError

__all__ = ["DeviceCollectives"]

_OPERATORS = (
    *("_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_"),
    *("allgather_into_tensor_coalesced_", "allreduce_", "allreduce_coalesced_", "alltoall_"),
    *("alltoall_base_", "broadcast_", "gather_", "recv_", "recv_any_source_", "reduce_"),
    *("reduce_scatter_", "reduce_scatter_tensor_coalesced_", "scatter_", "send"),
)
# Torch's functional collectives, which torch_xla puts into programs of the device.
_FUNCTIONAL = (
    *("all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast"),
    *("reduce_scatter_tensor",),
)


class DeviceCollectives:
    """The kernels, from construction until `close`.

    Args:
        has_world: whether programs of the device reach the other processes. Where they do not,
            functional collectives go over the host as well.
    """

    def __init__(self, has_world: bool):
        self._libraries = [torch.library.Library("c10d", "IMPL")]
        self._pending: set[_DeviceWork] = set()
        for name in _OPERATORS:
            self._libraries[0].impl(name, self._kernel(getattr(torch.ops.c10d, name)), "XLA")
        if not has_world:
            functional = torch.library.Library("_c10d_functional", "IMPL")
            for name in _FUNCTIONAL:
                kernel = _functional_kernel(getattr(torch.ops._c10d_functional, name))
                with warnings.catch_warnings():
                    # Torch warns of the first override in a process, which is this one on purpose.
                    warnings.filterwarnings("ignore", ".*other operators may also be overridden")
                    functional.impl(name, kernel, "XLA", allow_override=True)
            self._libraries.append(functional)

    def close(self) -> None:
        """Gives torch its own kernels back."""
        for library in self._libraries:
            library._destroy()  # pyright: ignore[reportPrivateUsage]

    def _kernel(self, operator: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            result = operator(*(_to_host(value, copies) for value in arguments))
            is_alone = not isinstance(result, tuple)
            work = _DeviceWork(result if is_alone else result[-1], copies, self._pending)
            # Of the returned tensors nobody needs more than what the arguments hold afterwards.
            return work.boxed() if is_alone else (arguments[0], work.boxed())

        return run


class _DeviceWork(dist.Work):
    """A collective on host copies, whose results go to the device when it is waited for."""

    def __init__(
        self,
        work: Any,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        pending: "set[_DeviceWork]",
    ):
        super().__init__()
        self._work = work
        self._copies = copies
        self._pending = pending
        pending.add(self)  # torch keeps the C++ half of this object only

    def wait(self, timeout: Any = None) -> bool:
        """Waits, and brings results to the device."""
        self._work.wait()
        with torch.no_grad():
            for device, host in self._copies:
                device.copy_(host)
        self._copies = []
        self._pending.discard(self)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` has nothing left to do."""
        if self._copies and self._work.is_completed():
            self.wait()
        return not self._copies

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done: waits here."""
        tensors = [device for device, _ in self._copies]
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(tensors)
        return future


def _functional_kernel(operator: Any) -> Callable[..., Any]:
    def run(value: torch.Tensor, *arguments: Any) -> torch.Tensor:
        # torch_xla names the group of all processes by an empty text.
        named = [dist.group.WORLD.group_name if a == "" else a for a in arguments]  # type: ignore[union-attr]
        result = operator(value.cpu(), *named)
        return torch.ops._c10d_functional.wait_tensor(result).to(value.device)

    return run


def _to_host(value: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "xla":
        if isinstance(value, FakeTensor):
            raise MpxlaError("a collective of torch.distributed was called while a step is traced.")
        host = value.detach().cpu()
        copies.append((value, host))
        return host
    if isinstance(value, (list, tuple)):
        return [_to_host(item, copies) for item in value]
    return value
