"""What runs between programs: moving tensors, and starting pending work.

The rest of mpxla reaches it through the backend (`backend.py`).
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch_xla
from torch_xla import runtime
from torch_xla.utils import dlpack

from mpxla.env import XLA_FLAG
from mpxla.errors import MpxlaError

__all__ = [
    "current_device",
    "host_view",
    "is_host_device",
    "make_ready",
    "to_device",
    "to_host",
]


_xla: Any = torch_xla._XLAC  # pyright: ignore[reportPrivateUsage]
_COMPACT = torch.contiguous_format


def current_device() -> torch.device:
    """The XLA device of this process, with its index.

    Touching it early matters: a host `backward()` before the first use of the device would fix the
    autograd engine's queues without one (torch 2.9).
    """
    if _xla._xla_runtime_is_initialized() and not _has_sound_products():
        raise MpxlaError(
            f"an XLA device was used before mpxla was imported, with XLA flags under which "
            f"products with updated weights are wrong (torch_xla 2.9 on CPU). Import mpxla before "
            f"the first use of a device, or set XLA_FLAGS={XLA_FLAG}."
        )
    device = torch.device(str(torch_xla.device()))
    torch.zeros(2).to(device)
    return device


def to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Moves tensors to the device as program arguments; those that are there stay.

    `Tensor.to` would make a constant of a scalar 0 or 1, which has to be compiled before a program
    can take it (torch_xla 2.9).
    """
    host = [t.detach() for t in tensors if t.device.type == "cpu"]
    uploaded = iter(_xla._xla_tensors_from_aten(host, [str(device)] * len(host)))
    return [next(uploaded) if t.device.type == "cpu" else t.detach().to(device) for t in tensors]


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for a tensor and gives it on the host; for reading only, it may share memory.

    On CPU a copy would be made by the device's own threads, which run programs: it would wait for
    the next program, though the value is there. A view needs no thread.
    """
    tensor = tensor.detach()
    if _loses_parts(tensor):
        return to_host([tensor])[0]
    if tensor.device.type != "xla" or not is_host_device():
        return tensor.cpu()
    if _xla._check_tensor_need_materialization([tensor])[0]:
        return tensor.cpu()
    # Starts nothing, but waits until the program that computes the tensor was given its buffers.
    _xla._xla_sync_multi([tensor], devices=[], wait=False, sync_xla_data=False)
    return torch.from_dlpack(dlpack.to_dlpack(tensor))


def make_ready(tensors: Iterable[torch.Tensor]) -> None:
    """Starts pending lazy computation of these tensors, so that programs can take them."""
    listed = [t for t in tensors if t.device.type == "xla"]
    if not listed:
        return
    is_pending = _xla._check_tensor_need_materialization(listed)
    pending = list(itertools.compress(listed, is_pending))
    if pending:
        _xla._xla_sync_multi(pending, devices=[], wait=True, sync_xla_data=True)


@functools.cache
def is_host_device() -> bool:
    """Whether XLA's device is the processor itself, whose memory is the host's."""
    return runtime.device_type() == "CPU"


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies tensors to the host at one point in time; nothing shares memory with the originals."""
    on_device = [t.detach() for t in tensors if t.device.type == "xla"]
    on_device = [torch.view_as_real(t) if _loses_parts(t) else t for t in on_device]
    copies = iter(_xla._xla_get_cpu_tensors(on_device) if on_device else ())

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "xla":
            return tensor.detach().clone(memory_format=_COMPACT)
        copied = next(copies)
        return torch.view_as_complex(copied) if _loses_parts(tensor) else copied

    return list(map(copy_of, tensors))


def _loses_parts(tensor: torch.Tensor) -> bool:
    """Whether torch_xla (2.9) would copy the real parts only to the host."""
    return tensor.device.type == "xla" and tensor.dtype is torch.complex128


def _has_sound_products() -> bool:
    """Whether a compiled product sees an update in place of its second factor.

    See `env.prepare_xla`; XNNPACK is chosen for products of these sizes.
    """
    device = torch_xla.device()
    left, right = torch.ones(256, 384).to(device), torch.zeros(384, 384).to(device)
    make_ready([left, right])
    seen = []
    for _ in range(3):
        right.add_(1.0)
        make_ready([right])
        product = left @ right
        make_ready([product])
        seen.append(product[0, 0].item() / 384)
    return seen == [1.0, 2.0, 3.0]
