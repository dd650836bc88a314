"""What a script sees as `torch.cuda`: the names that have a meaning for the rank's XLA device.

This module must not know SMP's names (`alias.py`).
"""

import contextlib
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import torch

from mpxla.compat.amp import Autocast, GradScaler
from mpxla.compat.devices import DeviceMap
from mpxla.compat.memory import MEMORY_FUNCTIONS, total_bytes
from mpxla.compat.names import cuda_name
from mpxla.compat.randomness import DeviceRandomness
from mpxla.compat.views import View, show
from mpxla.stage.device import flush, wait

__all__ = ["cuda_names"]

_SEEDING = frozenset(("manual_seed", "manual_seed_all", "seed_all", "_is_in_bad_fork"))
"""Libraries read them too: `torch.manual_seed` seeds all devices by them."""


@contextlib.contextmanager
def cuda_names(devices: DeviceMap) -> Generator[None]:
    """Lets the script's code read `torch.cuda` as names for the rank's device, until exit."""
    randomness = DeviceRandomness()
    functions = _functions(devices) | MEMORY_FUNCTIONS | randomness.functions()
    amp = {"autocast": Autocast, "GradScaler": GradScaler}
    modules = {name: getattr(torch.cuda, name) for name in ("amp", "random", "memory")}
    cuda = View(functions | modules, lambda name: cuda_name(name).text, _SEEDING)
    with contextlib.ExitStack() as views:
        views.enter_context(show(torch.cuda, cuda))
        views.enter_context(show(torch.cuda.random, cuda))
        views.enter_context(show(torch.cuda.memory, cuda))
        refuse_amp = View(amp, lambda name: cuda_name(f"amp.{name}").text)
        views.enter_context(show(torch.cuda.amp, refuse_amp))
        views.enter_context(show(torch.amp, View({"GradScaler": GradScaler})))
        randomness.start()
        views.callback(randomness.stop)
        yield


def _functions(devices: DeviceMap) -> dict[str, Any]:
    """Name in `torch.cuda` -> its replacement, for names that ask about the device."""

    @contextlib.contextmanager
    def device(index: Any) -> Generator[None]:
        devices.check(index)
        yield

    def synchronize(index: Any = None) -> None:
        devices.check(index)
        flush()
        wait()

    def properties(index: Any = None) -> SimpleNamespace:
        devices.check(index)
        return SimpleNamespace(name=device_name(index), total_memory=total_bytes())

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
        "synchronize": synchronize,
        "init": lambda: None,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }
