"""Which backend a process uses. The folder of a backend is imported only when it is chosen."""

import functools
import importlib
import importlib.metadata
import importlib.util
import sys

from mpxla.collection import collection_paused
from mpxla.device.backend import Backend
from mpxla.env import LaunchEnv, share_cores
from mpxla.errors import ConfigError
from mpxla.log import root_logger_kept
from mpxla.random_states import random_kept

__all__ = ["BACKENDS", "name_of_backend", "open_backend"]

BACKENDS = {
    "torch_xla": ("torch_xla", "mpxla.device.torch_xla.backend", "TorchXlaBackend"),
    "pjrt": ("jax", "mpxla.device.pjrt.backend", "PjrtBackend"),
    "eager": ("torch", "mpxla.device.eager", "EagerBackend"),
}
"""Name -> the package that it needs, and its class."""
_OLDEST_JAX = (0, 10)
"""The oldest jax that is a default. The extra `cpu-collectives` installs others too."""
_INSTALL = {"torch_xla": "pip install 'mpxla[torch-xla]'", "pjrt": "pip install 'mpxla[pjrt]'"}


def open_backend(env: LaunchEnv, key: str = "auto") -> Backend:
    """The backend of this process: its device's runtime is one per process, and so is this.

    See `name_of_backend` for what chooses it.

    Raises:
        ConfigError: there is no such backend, or the package that it needs is not installed.
    """
    name = name_of_backend(env, key)
    share_cores(env.local_size)
    return _opened(name)


def name_of_backend(env: LaunchEnv, key: str = "auto") -> str:
    """Which backend `open_backend` opens; imports nothing.

    Args:
        env: of this process; its variable MPXLA_DEVICE wins over the key.
        key: the key `device`: a name, or "auto" for the default: jax, but torch_xla where the
            script has imported it or asks for a device of it; the other one if that is not
            installed.

    Raises:
        ConfigError: there is no such backend, or the package that it needs is not installed.
    """
    name = env.device or key
    if name == "auto":
        if not _decided:
            _decided.append(_default(env.asks_for_cuda, env.asks_for_torch_xla))
        name = _decided[0]
    if name not in BACKENDS:
        raise ConfigError(
            f"MPXLA_DEVICE={name} is not a backend; choose one of {', '.join(BACKENDS)}, or auto."
        )
    if not _is_installed(BACKENDS[name][0]):
        raise ConfigError(
            f"device {name} needs the package {BACKENDS[name][0]}, which is not installed. "
            f"Install it by {_INSTALL[name]}, or choose another backend."
        )
    return name


_decided: list[str] = []
"""What "auto" means in this process, once that has been asked: a script may import torch_xla later,
which sets PJRT_DEVICE, too."""


def _default(asks_for_cuda: bool, asks_for_torch_xla: bool) -> str:
    """What "auto" means now.

    On the CPU jax takes shorter steps than torch_xla for most models, see docs/backends.md. A
    script that imports torch_xla before has tensors or settings of its own there.
    """
    installed = [name for name in _INSTALL if _is_installed(BACKENDS[name][0])]
    if not installed:
        raise ConfigError(
            "no backend is installed: mpxla needs torch_xla or jax to run programs. "
            f"Install one, by {' or '.join(_INSTALL.values())}."
        )
    is_of_torch_xla = "torch_xla" in sys.modules or asks_for_torch_xla or not _has_new_jax()
    first = "torch_xla" if is_of_torch_xla and not asks_for_cuda else "pjrt"
    return first if first in installed else installed[0]


def _has_new_jax() -> bool:
    try:
        numbers = importlib.metadata.version("jax").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(number) for number in numbers[:2] if number.isdecimal()) >= _OLDEST_JAX


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def _opened(name: str) -> Backend:
    _, module, kind = BACKENDS[name]
    # The import of jax draws random numbers, which a script that has seeded NumPy would miss.
    with root_logger_kept(), collection_paused(), random_kept():
        return getattr(importlib.import_module(module), kind)()
