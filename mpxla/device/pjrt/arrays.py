"""Host tensors and jax's arrays, without copies where both can share memory.

On the CPU an array shares a tensor's memory if that is contiguous and aligned; a tensor always
shares an array's. On other devices, and with plugins that have no dlpack, values are copied.

An array that shares memory with a tensor is not donated: XLA copies it then. So a tensor that users
see keeps its numbers.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax._src.lib import _jax

from mpxla.device.pjrt.dtypes import jax_dtype, torch_dtype

__all__ = [
    "ImportCache",
    "copy_to_device",
    "from_constant",
    "host_copies",
    "host_view",
    "shared_tensors",
]

_capsule_to_array: Any = getattr(_jax, "dlpack_managed_tensor_to_buffer", None)
"""Not public in jax: takes 8 us for a tensor where `jax.dlpack.from_dlpack` takes 70."""

_array_to_capsule: Any = getattr(_jax, "buffer_to_dlpack_managed_tensor", None)
"""Not public either: with it a tensor of an array takes 3 us, by `torch.from_dlpack` 12."""

_WITHOUT_DLPACK = (torch.float8_e4m3fn, torch.float8_e5m2)
_ARRAYS_WITHOUT_DLPACK = frozenset(jax_dtype(dtype) for dtype in _WITHOUT_DLPACK)


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A host tensor as NumPy has it, sharing memory; NumPy has no bfloat16 of its own."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        bits = torch.int16 if tensor.dtype.itemsize == 2 else torch.uint8
        return tensor.view(bits).numpy().view(jax_dtype(tensor.dtype))
    return tensor.numpy()


def from_constant(value: Any) -> Any:
    """A constant of a graph, as part of the program."""
    return jnp.asarray(_as_numpy(value)) if isinstance(value, torch.Tensor) else value


def copy_to_device(tensor: torch.Tensor, device: jax.Device) -> jax.Array:
    """An array with memory of its own, so that the tensor may change while programs run."""
    tensor = tensor.detach()
    if device.platform == "cpu" and tensor.device.type == "cpu":
        # A clone is aligned, and becomes an array as it is. `device_put` may copy later.
        return import_tensor(tensor.clone(memory_format=torch.contiguous_format), device)
    return jax.device_put(_as_numpy(tensor.cpu().clone()), device)


def import_tensor(tensor: torch.Tensor, device: jax.Device) -> jax.Array:
    """An array that shares the tensor's memory, or has a copy where that is not aligned."""
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if not tensor.numel() or tensor.dtype in _WITHOUT_DLPACK:
        return jax.device_put(_as_numpy(tensor.cpu()), device)
    if _capsule_to_array is not None and device.platform == "cpu":
        return _capsule_to_array(torch.utils.dlpack.to_dlpack(tensor), device, None)
    return jax.dlpack.from_dlpack(tensor)


def host_view(array: jax.Array) -> torch.Tensor:
    """Waits; a host tensor for reading only, which shares memory on the CPU."""
    (found,) = shared_tensors([array], torch.device("cpu"), array.device.platform)
    return found if found.device.type == "cpu" else found.cpu()


def shared_tensors(
    arrays: Sequence[jax.Array], device: torch.device, platform: str
) -> list[torch.Tensor]:
    """Waits; tensors of PyTorch's device, sharing memory with the arrays if they lie there.

    Args:
        arrays: all on one device.
        device: where the tensors shall be.
        platform: jax's name of the platform of the arrays' device; to ask an array takes 1 us.
    """
    jax.block_until_ready(arrays)  # a capsule does not wait
    shares = device.type == ("cuda" if platform == "gpu" else platform)
    is_host = platform == "cpu" and _array_to_capsule is not None
    found = []
    for array in arrays:
        if not shares or 0 in array.shape or array.dtype in _ARRAYS_WITHOUT_DLPACK:
            found.append(_as_tensor(np.array(array)).to(device))
        elif is_host:
            found.append(torch.utils.dlpack.from_dlpack(_array_to_capsule(array)))
        else:
            found.append(torch.from_dlpack(array))
    return found


def host_copies(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """Waits; copies of arrays as host tensors."""
    if all(array.device.platform == "cpu" for array in arrays):
        # Copied by PyTorch: threads of the device would do it after the programs that wait there.
        return [view.clone() for view in shared_tensors(arrays, torch.device("cpu"), "cpu")]
    return [_as_tensor(np.array(found)) for found in jax.device_get(list(arrays))]


def _as_tensor(found: np.ndarray) -> torch.Tensor:
    dtype = torch_dtype(found.dtype)
    if dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        bits = np.int16 if dtype.itemsize == 2 else np.uint8
        return torch.from_numpy(found.view(bits)).view(dtype)
    return torch.from_numpy(found)


class ImportCache:
    """Arrays of tensors that come again, such as parameters.

    A parameter is an argument of every program. It is imported again when it was written to, or
    has other memory.

    Args:
        device: where arrays lie.
        shares_memory: whether PyTorch's tensors lie in the same memory.
    """

    def __init__(self, device: jax.Device, shares_memory: bool):
        self._device = device
        self._shares_memory = shares_memory
        self._import = import_tensor if shares_memory else copy_to_device
        self._found: dict[int, tuple[Any, int, int, jax.Array]] = {}

    def array_of(self, tensor: torch.Tensor) -> jax.Array:
        """The array of a tensor, which it may share memory with."""
        if tensor.is_inference():  # PyTorch does not tell when it is written to
            return self._import(tensor, self._device)
        key = id(tensor)
        known = self._found.get(key)
        if known is not None:
            place, version, pointer, array = known
            is_same = place() is tensor and version == tensor._version
            # One whose memory a program has taken is gone, though somebody may hold its tensor.
            if is_same and pointer == tensor.data_ptr() and not array.is_deleted():
                return array
        array = self._import(tensor, self._device)
        self.remember(tensor, array)
        return array

    def remember(self, tensor: torch.Tensor, array: jax.Array) -> None:
        """Takes note of a tensor that shares memory with an array, if it does.

        A copy would not see what is written to the tensor through `.data`.
        """
        pointer = tensor.data_ptr()
        if not self._shares_memory or array.unsafe_buffer_pointer() != pointer:
            return
        if tensor.is_inference():
            return
        place = _Place(tensor, self._forget)
        place.key = id(tensor)
        self._found[place.key] = (place, tensor._version, pointer, array)

    def _forget(self, place: "_Place") -> None:
        self._found.pop(place.key, None)


class _Place(weakref.ref[torch.Tensor]):
    """A weak reference that knows its key, which costs less than a closure for each."""

    __slots__ = ("key",)
    key: int
