"""Runs a script as `__main__` where SMP's package exists and CUDA names mean the XLA device."""

import contextlib
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mpxla.compat import CompatError
from mpxla.compat.alias import importable
from mpxla.compat.check import check_script
from mpxla.compat.cuda import cuda_names
from mpxla.compat.devices import DeviceMap, DeviceMapping, device_backend
from mpxla.compat.huggingface import speaks_trainer
from mpxla.compat.loading import loads_onto_device
from mpxla.compat.names import Fate
from mpxla.compat.patching import Patches
from mpxla.compat.processes import nccl_means_gloo, ranks_told
from mpxla.compat.settings import pipeline_configuration, trainer_variables
from mpxla.env import read_environment, set_variables
from mpxla.graph.capture.recorder import current_recorder
from mpxla.log import get_logger
from mpxla.user_lines import at_script_line, script_line_of

__all__ = ["mapped", "run_script"]


@contextlib.contextmanager
def mapped() -> Generator[None]:
    """Everything that the launcher changes, undone on exit."""
    env = read_environment()
    devices = DeviceMap(env.local_rank, env.local_size)
    with (
        ranks_told(env),
        importable(),
        cuda_names(devices),
        nccl_means_gloo(),
        loads_onto_device(devices, bool((env.mpxla_config or {}).get("trust_checkpoints"))),
        _torch_on_device(),
        speaks_trainer(),
        DeviceMapping(devices),
    ):
        yield


def run_script(
    script: Path, arguments: Sequence[str], pipeline: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Runs a script as `python script arguments` would, inside `mapped()`.

    Args:
        script: the file.
        arguments: its command line.
        pipeline: the launcher's options for a pipeline, if there are any (`settings`).

    Returns:
        The script's global names at its end.
    """
    variables: dict[str, str] = {}
    if pipeline is not None:
        configuration = pipeline_configuration(pipeline, read_environment().world_size)
        variables = trainer_variables(configuration)
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(script)  # as Python does: scripts look for files beside them
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    saved = sys.argv, list(sys.path), sys.modules["__main__"]
    code = compile(script.read_bytes(), main.__file__, "exec")
    _warn_of_differences(script)
    sys.argv = [str(script), *arguments]
    sys.path[0:1] = [str(script.resolve().parent)]
    sys.modules["__main__"] = main
    before = set_variables(variables)
    try:
        with mapped(), _explained():
            exec(code, main.__dict__)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = saved
        set_variables(before)
    return main.__dict__


def _warn_of_differences(script: Path) -> None:
    """Says what runs but gives another answer than with CUDA, since nothing can catch it later."""
    if read_environment().rank != 0:
        return
    with contextlib.suppress(SyntaxError):  # of a file beside the script: its import will tell
        for file, line, name, meaning in check_script(script):
            if meaning.fate is Fate.DIFFERS:
                get_logger().warning("%s:%d: %s: %s", file, line, name, meaning.text)


@contextlib.contextmanager
def _torch_on_device() -> Generator[None]:
    """What of torch no function mode sees means the XLA device, until exit."""

    def autocast(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        make_autocast(self, "xla" if device_type == "cuda" else device_type, *args, **kwargs)

    def enter(self: Any) -> Any:
        entered, kind = enter_autocast(self), device_backend().device.type
        if self.device == "xla" and kind != "xla" and current_recorder() is None:
            # Operators outside of steps see tensors of this kind. In steps the region's kind is
            # `xla` whatever the device, as torch casts other operators on the host.
            beside[id(self)] = host = object.__new__(torch.autocast)
            make_autocast(host, kind, self.fast_dtype, self._enabled, self._cache_enabled)
            enter_autocast(host)
        return entered

    def leave(self: torch.autocast, *error: Any) -> Any:
        if id(self) in beside:
            leave_autocast(beside.pop(id(self)), *error)
        return leave_autocast(self, *error)

    def set_type(kind: Any) -> None:  # torch takes types of CUDA without a device
        if isinstance(kind, str) and kind.startswith("torch.cuda."):
            raise CompatError(
                f"{at_script_line()}: {kind} as the default type cannot be mapped onto an XLA "
                f'device: use torch.set_default_device("cuda") and torch.set_default_dtype.'
            )
        set_default_type(kind)

    beside: dict[int, torch.autocast] = {}
    with Patches() as patches:
        make_autocast = patches.replace(torch.autocast, "__init__", autocast)
        enter_autocast = patches.replace(torch.autocast, "__enter__", enter)
        leave_autocast = patches.replace(torch.autocast, "__exit__", leave)
        set_default_type = patches.replace(torch, "set_default_tensor_type", set_type)
        # Torch refuses streams of other classes. XLA keeps what pending work reads.
        patches.replace(torch.Tensor, "record_stream", lambda self, stream: None)
        # `module.to(device)` keeps the parameter objects, as between the host and CUDA devices:
        # optimizers that were built before would hold the parameters of the host otherwise.
        future, swaps = torch.__future__, torch.__future__.get_swap_module_params_on_conversion()
        future.set_swap_module_params_on_conversion(True)
        try:
            yield
        finally:
            future.set_swap_module_params_on_conversion(swaps)


_TORCHS_TEXTS = ("NVIDIA driver", "CUDA driver", "compiled with CUDA", "ATen_cuda")


@contextlib.contextmanager
def _explained() -> Generator[None]:
    """Torch's errors for want of a CUDA device say which line of the script asks for one."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        if isinstance(error, CompatError) or not any(t in str(error) for t in _TORCHS_TEXTS):
            raise
        raise CompatError(
            f"{script_line_of(error)}: this asks torch for a CUDA device in a way that cannot be "
            f"mapped onto an XLA device ({str(error).splitlines()[0]})"
        ) from error
