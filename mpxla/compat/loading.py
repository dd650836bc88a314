"""Files with CUDA devices: where `torch.load` and safetensors put tensors, and where these were."""

import contextlib
import functools
import pickle
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree

from mpxla.compat import CompatError
from mpxla.compat.devices import DeviceMap
from mpxla.compat.patching import Patches, patched_on_import
from mpxla.user_lines import at_script_line

__all__ = ["loads_onto_device"]

_PRIORITY = 5
"""Torch asks its packages for storages in this order; its own begin at 10."""


@contextlib.contextmanager
def loads_onto_device(devices: DeviceMap, trusts_files: bool = False) -> Generator[None]:
    """Tensors of files go to the XLA device where they belong on a CUDA one, until exit.

    XLA's tensors have no storages. Those for the device stay on the host while a file is read;
    then the tensors in them are moved.

    Args:
        devices: where to.
        trusts_files: files may run code, unless the script passes `weights_only=True`. That is how
            torch loaded until version 2.6, and scripts from that time count on it.
    """
    on_device: set[int] = set()
    loads_running: list[None] = []

    def restore(storage: Any, location: str) -> Any:
        """Leaves a storage of the device on the host, for now; None: it is another package's."""
        if not location.startswith(("cuda", "xla")):
            return None
        on_device.add(storage.data_ptr())
        return storage

    def move_storage(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
        """`storage.cuda()`, which functions given as `map_location` call."""
        if not loads_running:
            raise CompatError(
                f"{at_script_line()}: a storage cannot be moved to an XLA device, whose tensors "
                f"have none; move the tensor."
            )
        devices.check(device)
        return restore(storage, "cuda")

    @functools.wraps(torch.load)
    def load(*args: Any, **kwargs: Any) -> Any:
        on_device.clear()
        loads_running.append(None)
        if trusts_files and kwargs.get("weights_only") is None:
            kwargs["weights_only"] = False
        try:
            loaded = original(*args, **kwargs)
        except pickle.UnpicklingError as error:
            error.add_note(
                "mpxla: if you trust the file, the launcher's option --trust-checkpoints lets "
                "torch.load take it."
            )
            raise
        finally:
            loads_running.pop()
        return pytree.tree_map(_mover(on_device), loaded) if on_device else loaded

    original = torch.load
    torch.serialization.register_package(_PRIORITY, lambda storage: None, restore)
    try:
        with Patches() as patches, patched_on_import({"safetensors.torch": _patch_safetensors}):
            for module in (torch, torch.serialization):
                patches.replace(module, "load", load)
            patches.replace(torch.UntypedStorage, "cuda", move_storage)
            yield
    finally:
        registry = torch.serialization._package_registry  # pyright: ignore[reportPrivateUsage]
        registry[:] = [entry for entry in registry if entry[2] is not restore]


def _patch_safetensors(module: ModuleType, patches: Patches) -> None:
    """Files are read onto the host: what creates tensors on CUDA devices is not torch's Python."""
    original = module.load_file

    @functools.wraps(original)
    def load_file(filename: Any, device: Any = "cpu", **kwargs: Any) -> dict[str, torch.Tensor]:
        loaded = original(filename, **kwargs)
        return {name: tensor.to(device) for name, tensor in loaded.items()}

    patches.replace(module, "load_file", load_file)


def _mover(on_device: set[int]) -> Callable[[Any], Any]:
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    """By the id of a tensor on the host, which is kept: what two places share stays shared."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            _move_module(value, move)
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        if value.untyped_storage().data_ptr() not in on_device:
            return value
        if id(value) not in moved:
            copy = value.detach().cuda()
            if isinstance(value, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy)
            moved[id(value)] = value, copy.requires_grad_(value.requires_grad)
        return moved[id(value)][1]

    return move


def _move_module(module: torch.nn.Module, move: Callable[[Any], Any]) -> None:
    """Moves what the modules of a tree hold."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):  # pyright: ignore[reportPrivateUsage]
            for name, tensor in table.items():
                table[name] = move(tensor)  # pyright: ignore[reportArgumentType]
