"""`torch.load` with CUDA devices: as `map_location`, and as the place where tensors were saved."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

__all__ = ["loads_onto_device"]


@contextlib.contextmanager
def loads_onto_device() -> Iterator[None]:
    """`torch.load` puts on the XLA device what belongs on a CUDA one, until exit."""
    original = torch.load
    torch.load = torch.serialization.load = _loading(original)
    try:
        yield
    finally:
        torch.load = torch.serialization.load = original


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def call(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not _may_name_device(map_location):
            return load(f, map_location, *args, **kwargs)
        on_device: set[int] = set()

        def place(storage: Any, location: str) -> Any:
            """Keeps storages of the device on the host for now; None: as torch does."""
            target = _target(map_location, location)
            if not target.startswith(("cuda", "xla")):
                return None if map_location is None else storage
            on_device.add(storage.data_ptr())
            return storage

        loaded = load(f, place, *args, **kwargs)
        return pytree.tree_map(lambda value: _moved(value, on_device), loaded)

    return call


def _may_name_device(map_location: Any) -> bool:
    if map_location is None or isinstance(map_location, dict):
        return True
    return not callable(map_location) and str(map_location).startswith(("cuda", "xla"))


def _target(map_location: Any, location: str) -> str:
    if isinstance(map_location, dict):
        return str(map_location.get(location, location))
    return location if map_location is None else str(map_location)


def _moved(value: Any, on_device: set[int]) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    if value.untyped_storage().data_ptr() not in on_device:
        return value
    moved = value.detach().cuda()
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad=value.requires_grad)
    return moved.requires_grad_(value.requires_grad)
