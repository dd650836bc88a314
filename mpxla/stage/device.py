"""The device of this process, as the rest of mpxla sees it.

With `compile.py` this is the seam to torch_xla for everything that runs between programs: moving
tensors, starting pending work, waiting, versions.
"""

from collections.abc import Iterable, Sequence

import torch
import torch_xla
import torch_xla.core.xla_model as xm

__all__ = ["current_device", "flush", "make_ready", "to_device", "wait"]


def current_device() -> torch.device:
    """The XLA device of this process, with its index.

    Touching it early matters: a host `backward()` before the first use of the device would fix the
    autograd engine's queues without one (torch 2.9).
    """
    torch_xla.device()
    device = torch.device(str(torch_xla.device()))
    torch.zeros(2).to(device)
    return device


def to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Moves tensors to the device as program arguments."""
    moved = [t.detach().to(device) for t in tensors]
    # A scalar upload stays a pending constant, which a program cannot take as an argument.
    make_ready([t for t in moved if t.numel() == 1])
    return moved


def make_ready(tensors: Iterable[torch.Tensor]) -> None:
    """Starts pending lazy computation of these tensors, so that programs can take them."""
    listed = [t for t in tensors if t.device.type == "xla"]
    if not listed:
        return
    pending = [
        t
        for t, needed in zip(
            listed, torch_xla._XLAC._check_tensor_need_materialization(listed), strict=True
        )
        if needed
    ]
    if pending:
        torch_xla._XLAC._xla_sync_multi(pending, devices=[], wait=True, sync_xla_data=True)


def flush() -> None:
    """Starts all pending lazy computation of the process (optimizer updates)."""
    torch_xla.sync()


def wait() -> None:
    """Waits until the device has finished everything that was started."""
    xm.wait_device_ops()
