"""`torch.load` with CUDA devices: as `map_location`, and as the place where tensors were saved."""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.utils._pytree as pytree

__all__ = ["loads_onto_device"]

_PRIORITY = 5
"""Torch asks its packages for storages in this order; its own begin at 10."""


@contextlib.contextmanager
def loads_onto_device() -> Generator[None]:
    """`torch.load` puts on the XLA device what belongs on a CUDA one, until exit."""
    original = torch.load
    on_device: set[int] = set()

    def restore(storage: Any, location: str) -> Any:
        """Leaves a storage of the device on the host, for now; None: it is another package's."""
        if not location.startswith(("cuda", "xla")):
            return None
        on_device.add(storage.data_ptr())
        return storage

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        on_device.clear()
        loaded = original(*args, **kwargs)
        return pytree.tree_map(_mover(on_device), loaded) if on_device else loaded

    torch.serialization.register_package(_PRIORITY, lambda storage: None, restore)
    torch.load = torch.serialization.load = load
    try:
        yield
    finally:
        torch.load = torch.serialization.load = original
        registry = torch.serialization._package_registry  # pyright: ignore[reportPrivateUsage]
        registry[:] = [entry for entry in registry if entry[2] is not restore]


def _mover(on_device: set[int]) -> Callable[[Any], Any]:
    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        if value.untyped_storage().data_ptr() not in on_device:
            return value
        moved = value.detach().cuda()
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(moved, requires_grad=value.requires_grad)
        return moved.requires_grad_(value.requires_grad)

    return move
