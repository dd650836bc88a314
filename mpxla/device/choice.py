"""Which backend a process uses. The folder of a backend is imported only when it is chosen."""

import functools
import importlib
import importlib.util

from mpxla.device.backend import Backend
from mpxla.env import LaunchEnv
from mpxla.errors import ConfigError
from mpxla.log import root_logger_kept

__all__ = ["BACKENDS", "open_backend"]

BACKENDS = {
    "torch_xla": ("torch_xla", "mpxla.device.torch_xla.backend", "TorchXlaBackend"),
    "pjrt": ("jax", "mpxla.device.pjrt.backend", "PjrtBackend"),
    "eager": ("torch", "mpxla.device.eager", "EagerBackend"),
}
"""Name -> the package that it needs, and its class."""
_DEFAULTS = ("torch_xla", "pjrt")
"""Of these the first that is installed is the default; the last, where CUDA is asked for."""
_INSTALL = {"torch_xla": "pip install 'mpxla[torch-xla]'", "pjrt": "pip install 'mpxla[pjrt]'"}


def open_backend(env: LaunchEnv, key: str = "auto") -> Backend:
    """The backend of this process: its device's runtime is one per process, and so is this.

    Args:
        env: of this process; its variable MPXLA_DEVICE wins over the key.
        key: the key `device`: a name, or "auto" for the default, which is jax where CUDA is asked
            for, else torch_xla; the other one if that is not installed.

    Raises:
        ConfigError: there is no such backend, or the package that it needs is not installed.
    """
    name = env.device or key
    if name == "auto":
        order = reversed(_DEFAULTS) if env.asks_for_cuda else _DEFAULTS
        name = next((n for n in order if _is_installed(BACKENDS[n][0])), None)
        if name is None:
            raise ConfigError(
                "no backend is installed: mpxla needs torch_xla or jax to run programs. "
                f"Install one, by {' or '.join(_INSTALL.values())}."
            )
    if name not in BACKENDS:
        raise ConfigError(
            f"MPXLA_DEVICE={name} is not a backend; choose one of {', '.join(BACKENDS)}, or auto."
        )
    if not _is_installed(BACKENDS[name][0]):
        raise ConfigError(
            f"device {name} needs the package {BACKENDS[name][0]}, which is not installed. "
            f"Install it by {_INSTALL[name]}, or choose another backend."
        )
    return _opened(name)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def _opened(name: str) -> Backend:
    _, module, kind = BACKENDS[name]
    with root_logger_kept():
        return getattr(importlib.import_module(module), kind)()
