"""CUDA devices in calls of torch become the rank's XLA device.

A `TorchFunctionMode` sees every call of torch on its thread before it runs, `torch.device(...)`
included, so that no function of torch has to be replaced. Only calls that name a CUDA device are
changed. This module must not know `torch.cuda` (`cuda.py`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch.overrides import TorchFunctionMode

from mpxla.compat import CompatError
from mpxla.compat.names import cuda_name
from mpxla.delayed import is_delayed
from mpxla.device.backend import Backend
from mpxla.device.choice import open_backend
from mpxla.env import read_environment
from mpxla.session import current, is_initialized
from mpxla.user_lines import at_script_line

__all__ = ["DeviceMap", "DeviceMapping", "device_backend"]


def device_backend() -> Backend:
    """The session's backend, or before `smp.init` the one that it will have.

    Scripts for CUDA tell the device's tensors from those of the host, so torch_xla is the default
    where it is installed: on it they are of another kind on the CPU too.
    """
    if is_initialized():
        return current().backend
    return open_backend(dataclasses.replace(read_environment(), asks_for_torch_xla=True))


class DeviceMap:
    """Which CUDA device means which XLA device: every process has one of the host's.

    Args:
        local_rank: index of this process on its host, and so of its device.
        local_size: number of processes on the host.
    """

    def __init__(self, local_rank: int, local_size: int):
        self.local_rank = local_rank
        self.local_size = local_size
        self._device: torch.device | None = None

    def find(self, value: Any) -> torch.device:
        """The XLA device for an index, `"cuda"`, `"cuda:1"`, a CUDA device or None.

        Raises:
            CompatError: there is no such index on this host.
        """
        self.check(value)
        if self._device is None:  # not before it is used: scripts may start processes first
            self._device = device_backend().device
        return self._device

    def check(self, value: Any) -> None:
        """Raises `CompatError` if the host has no device of this index."""
        index = _index(value)
        if index is not None and not -1 <= index < self.local_size:
            raise CompatError(
                f"{at_script_line()}: there is no device cuda:{index}: {self.local_size} "
                f"process(es) run on this host, each with one device. Use smp.local_rank() or no "
                f"index."
            )


def _index(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, str):
        _, has_index, text = value.partition(":")
        return int(text) if has_index and text.isdecimal() else None
    if isinstance(value, torch.device):
        return value.index
    return int(value)


_parse_to = cast(Any, torch)._C._nn._parse_to
_TAKE_DEVICE_BY_POSITION = frozenset((torch.Tensor.to, _parse_to))


class DeviceMapping(TorchFunctionMode):
    """While active, CUDA devices in calls of torch mean the device of the map."""

    def __init__(self, devices: DeviceMap):
        super().__init__()
        self._devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = self._own.get(func)
        if own is not None:
            return own(self, *args, **(kwargs or {}))
        if func in _TAKE_DEVICE_BY_POSITION:
            if args and _is_delayed(args[0]):
                return func(args[0], *map(_delayed, args[1:]), **_delayed_names(kwargs))
            args = tuple(self._mapped(value) for value in args)
        if not kwargs:
            return func(*args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._mapped(kwargs["device"])}
        return func(*args, **kwargs)

    def _mapped(self, value: Any) -> Any:
        return self._devices.find(value) if _means_cuda(value) else value

    def _cuda(self, tensor: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._devices.check(device)
        return tensor if _is_delayed(tensor) else tensor.to(self._devices.find(device))

    def _pin_memory(self, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        """XLA reads host memory as it is."""
        return tensor

    def _type(self, tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            reason = cuda_name(dtype.removeprefix("torch.cuda.")).text
            raise CompatError(
                f"{at_script_line()}: {dtype} cannot be mapped onto an XLA device: {reason}."
            )
        return tensor.type(dtype, *args, **kwargs)

    def _is_cuda(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._devices.find(None)

    def _make_device(self, *args: Any, **kwargs: Any) -> torch.device:
        kind = kwargs.get("type", args[0] if args else None)
        if not _means_cuda(kind):
            return torch.device(*args, **kwargs)
        index = kwargs.get("index", args[1] if len(args) > 1 else None)
        return self._devices.find(kind if index is None else index)

    _own: ClassVar[dict[Any, Callable[..., Any]]] = {
        torch.device: _make_device,
        torch.Tensor.cuda: _cuda,
        torch.Tensor.pin_memory: _pin_memory,
        torch.Tensor.type: _type,
        cast(Any, torch.Tensor.is_cuda).__get__: _is_cuda,
    }


def _means_cuda(value: Any) -> bool:
    """Whether a value that names a device names a CUDA device; a bare index does."""
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, int) and not isinstance(value, bool)


# A parameter of `smp.delay_param_initialization` has no values yet; the first step moves it.


def _is_delayed(value: Any) -> bool:
    is_meta = isinstance(value, torch.Tensor) and value.device.type == "meta"
    return is_meta and is_delayed(value)


def _delayed(value: Any) -> Any:
    is_device = isinstance(value, torch.device | str) or _means_cuda(value)
    return torch.device("meta") if is_device else value


def _delayed_names(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    return {name: _delayed(value) for name, value in (kwargs or {}).items()}
