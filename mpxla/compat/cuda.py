"""What a script sees as `torch.cuda`: the names that have a meaning for the rank's XLA device.

This module must not know SMP's names (`alias.py`).
"""

import contextlib
import functools
import sys
from collections.abc import Generator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch

from mpxla.compat import CompatError
from mpxla.compat.devices import DeviceMap
from mpxla.compat.memory import MEMORY_FUNCTIONS, total_bytes
from mpxla.compat.names import CUDA_AMP_NAMES, CUDA_NAMES, REFUSED, Fate, Name, cuda_name
from mpxla.compat.patching import View, show
from mpxla.compat.randomness import DeviceRandomness
from mpxla.compat.streams import NVTX_FUNCTIONS, STREAM_FUNCTIONS, synchronize
from mpxla.parallel.gradients.grad_scaler import GradScaler
from mpxla.user_lines import at_script_line

__all__ = ["Autocast", "cuda_names"]

_AMP_MODULES = ("amp", "amp.autocast_mode", "amp.grad_scaler")
_SHARED = frozenset(("manual_seed", "manual_seed_all", "seed_all", "_is_in_bad_fork", "set_device"))
"""Libraries read them too: `torch.manual_seed` seeds all devices by the first ones, and who sets a
device has made it under `DeviceMapping`, so that it is an XLA device, which CUDA's own refuses."""


class Autocast(torch.autocast):
    """`torch.cuda.amp.autocast` for the XLA device.

    Args:
        enabled: whether the region casts.
        dtype: None for the device's own half precision, bfloat16.
        cache_enabled: whether casts of parameters are kept during the region.
    """

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True
    ):
        super().__init__("xla", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


@contextlib.contextmanager
def cuda_names(devices: DeviceMap) -> Generator[None]:
    """Lets the script's code read `torch.cuda` as names for the rank's device, until exit."""
    randomness = DeviceRandomness()
    functions = _functions(devices) | STREAM_FUNCTIONS | MEMORY_FUNCTIONS | randomness.functions()
    amp = {"autocast": Autocast, "GradScaler": GradScaler}
    replacements = {
        **dict.fromkeys(("", "random", "memory", "streams"), functions | _modules(CUDA_NAMES)),
        **dict.fromkeys(_AMP_MODULES, amp | _modules(CUDA_AMP_NAMES, "amp.")),
        "nvtx": NVTX_FUNCTIONS,
    }
    with contextlib.ExitStack() as views:
        for below, module in _public_modules():
            reason = functools.partial(_reason, below)
            shared = _SHARED if below in ("", "random") else frozenset[str]()
            view = View(replacements.get(below, {}), reason, shared)
            views.enter_context(show(module, view))
        views.enter_context(show(torch.amp, View({"GradScaler": GradScaler})))
        forking = View({"fork_rng": randomness.fork}, shared=frozenset(("fork_rng",)))
        views.enter_context(show(torch.random, forking))
        views.enter_context(randomness)
        yield


def _public_modules() -> list[tuple[str, ModuleType]]:
    """`torch.cuda` under "", and its submodules under their paths below it."""
    found = [("", torch.cuda)]
    for path, module in sys.modules.items():
        below = path.removeprefix("torch.cuda.")
        if below != path and "._" not in f".{below}":
            found.append((below, module))
    return found


def _modules(names: Mapping[str, Name], prefix: str = "") -> dict[str, ModuleType]:
    """Those of the names that are modules."""
    paths = {name: sys.modules.get(f"torch.cuda.{prefix}{name}") for name in names}
    return {
        name: module
        for name, module in paths.items()
        if module is not None and names[name].fate is Fate.SUPPORTED
    }


def _reason(below: str, name: str) -> str:
    """Why a name of a module below `torch.cuda` cannot be mapped."""
    return cuda_name(f"{below}.{name}" if below else name).text


class _Properties(NamedTuple):
    """What `get_device_properties` knows of an XLA device."""

    name: str
    total_memory: int
    """Bytes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CompatError(
            f"{at_script_line()}: get_device_properties().{name} cannot be mapped onto an XLA "
            f"device: {REFUSED}."
        )


def _functions(devices: DeviceMap) -> dict[str, Any]:
    """Name in `torch.cuda` -> its replacement, for names that ask about the device."""

    @contextlib.contextmanager
    def device(index: Any) -> Generator[None]:
        devices.check(index)
        yield

    def synchronize_device(index: Any = None) -> None:
        devices.check(index)
        synchronize()

    def properties(index: Any = None) -> _Properties:
        return _Properties(device_name(index), total_bytes())

    def device_name(index: Any = None) -> str:
        return f"XLA device {devices.find(index)}"

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: devices.local_size,
        "current_device": lambda: devices.local_rank,
        "set_device": devices.check,
        "device": device,
        "get_device_name": device_name,
        "get_device_properties": properties,
        "synchronize": synchronize_device,
        "init": lambda: None,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }
