"""Host tensors and jax's arrays, without copies where both can share memory.

On the CPU an array shares a tensor's memory if that is contiguous and aligned; a tensor always
shares an array's. On other devices, and with plugins that have no dlpack, values are copied.

An array that shares memory with a tensor is not donated: it is copied then, on the CPU by XLA. So a
tensor that users see keeps its numbers, unless they are written to it.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax._src.lib import _jax  # pyright: ignore[reportPrivateUsage]
from torch.utils import dlpack

from mpxla.device.pjrt.dtypes import jax_dtype, torch_dtype

__all__ = [
    "Device",
    "ImportCache",
    "copy_to_device",
    "from_constant",
    "host_copies",
    "host_view",
    "is_array_of",
    "shared_tensors",
]

Device: TypeAlias = Any
"""`jax.Device`, which is a variable to pyright: jaxlib is compiled, and tells no types."""

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


def copy_to_device(tensor: torch.Tensor, device: Device, owned: bool = False) -> jax.Array:
    """An array with memory of its own, so that the tensor may change while programs run.

    A tensor that is owned does not change, and on the CPU its memory becomes the array's.
    """
    tensor = tensor.detach()
    if device.platform == "cpu" and tensor.device.type == "cpu":
        # A clone is aligned, and becomes an array as it is. `device_put` may copy later.
        kept = tensor if owned else tensor.clone(memory_format=torch.contiguous_format)
        return import_tensor(kept, device)
    kept = tensor.cpu()
    return jax.device_put(_as_numpy(kept if owned else kept.clone()), device)


def import_tensor(tensor: torch.Tensor, device: Device) -> jax.Array:
    """An array that shares the tensor's memory, or has a copy where that is not aligned."""
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if 1 in tensor.shape:  # whose strides jax takes for a layout that no program was compiled for
        tensor = tensor.view(-1).view(tensor.shape)
    is_foreign = tensor.device.type not in ("cpu", "cuda")  # a lazy tensor of torch_xla's
    if is_foreign or not tensor.numel() or tensor.dtype in _WITHOUT_DLPACK:
        return jax.device_put(_as_numpy(tensor.cpu()), device)
    if _capsule_to_array is not None and device.platform == "cpu":
        return _capsule_to_array(dlpack.to_dlpack(tensor), device, None)
    return jax.dlpack.from_dlpack(tensor)


def host_view(array: jax.Array) -> torch.Tensor:
    """Waits; a host tensor for reading only, which shares memory on the CPU."""
    (found,) = shared_tensors([array], torch.device("cpu"), _platform(array))
    return found if found.device.type == "cpu" else found.cpu()


def shared_tensors(
    arrays: Sequence[jax.Array], device: torch.device, platform: str
) -> list[torch.Tensor]:
    """Waits; tensors of PyTorch's device, sharing memory with the arrays if they lie there.

    The arrays are all on one device, of jax's platform `platform`; to ask an array takes 1 us.
    """
    jax.block_until_ready(arrays)  # a capsule does not wait
    shares = device.type == ("cuda" if platform == "gpu" else platform)
    to_capsule = _array_to_capsule if platform == "cpu" else None
    from_capsule = torch._C._from_dlpack  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
    found: list[torch.Tensor] = []
    for array in arrays:
        if not shares or 0 in array.shape or array.dtype in _ARRAYS_WITHOUT_DLPACK:
            found.append(_as_tensor(np.array(array)).to(device))
        elif to_capsule is not None:
            found.append(from_capsule(to_capsule(array)))  # the public one looks for a method
        else:
            found.append(torch.from_dlpack(array))
    return found


def _platform(array: jax.Array) -> str:
    device: Device = array.device  # a sharding, by its type; here arrays are of one device
    return device.platform


def host_copies(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """Waits; copies of arrays as host tensors."""
    if all(_platform(array) == "cpu" for array in arrays):
        # Copied by PyTorch: threads of the device would do it after the programs that wait there.
        return [view.clone() for view in shared_tensors(arrays, torch.device("cpu"), "cpu")]
    return [_as_tensor(np.array(found)) for found in jax.device_get(list(arrays))]


def _as_tensor(found: np.ndarray) -> torch.Tensor:
    dtype = torch_dtype(found.dtype)
    if dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        bits = np.int16 if dtype.itemsize == 2 else np.uint8
        return torch.from_numpy(found.view(bits)).view(dtype)
    return torch.from_numpy(found)


def is_array_of(array: jax.Array, tensor: torch.Tensor) -> bool:
    """Whether an array that a tensor was made of, or was given, still is what the tensor is.

    An array that is there, and that no program has taken the memory of, has it for itself: what is
    at the same address has the same numbers, whoever writes to them.
    """
    return (
        not array.is_deleted()
        and array.unsafe_buffer_pointer() == tensor.data_ptr()
        and tensor.is_contiguous()
        and array.shape == tensor.shape
        and array.dtype == jax_dtype(tensor.dtype)
        and not (tensor.is_neg() or tensor.is_conj())
    )


class _Known(NamedTuple):
    """An array that shares a tensor's memory, and which version of the tensor that was."""

    owner: "_Owner"
    version: int
    array: jax.Array


class _Notes(dict[int, _Known]):
    """Arrays by a key of what owns their memory, for as long as the owner is there."""

    def note(
        self,
        key: int,
        owner: torch.Tensor | torch.UntypedStorage,
        tensor: torch.Tensor,
        array: jax.Array,
    ) -> None:
        """Takes note of the array of a tensor."""
        place = _Owner(owner, self._drop)
        place.key = key
        self[key] = _Known(place, tensor._version, array)

    def _drop(self, gone: "_Owner") -> None:
        known = self.get(gone.key)
        if known is not None and known.owner is gone:
            del self[gone.key]


class ImportCache:
    """Arrays of tensors that come again, such as parameters.

    A parameter is an argument of every program. It is imported again when it was written to, or
    has other memory.

    An array made of a tensor keeps the tensor's memory, so it is noted for as long as the tensor
    itself is there. That takes a weak reference to the tensor, which forbids
    `torch.utils.swap_tensors`: `forget` takes it away. A tensor made of an array is an owner of the
    array's memory like others, so the array is noted for as long as the tensor's storage is there.
    """

    def __init__(self, device: Device, shares_memory: bool):
        self._device = device
        self._shares_memory = shares_memory
        self._import = self._import_anew if shares_memory else copy_to_device
        self._made_of = weakref.WeakValueDictionary[int, jax.Array]()  # tensors; by id
        self._shown = weakref.WeakValueDictionary[int, torch.UntypedStorage]()  # by id of the array
        self._imported = _Notes()  # by id of the tensor
        self._published = _Notes()  # by address

    def array_of(self, tensor: torch.Tensor) -> jax.Array:
        """The array of a tensor, which it may share memory with."""
        if tensor.is_inference():  # PyTorch does not tell when it is written to
            return self._import(tensor, self._device)
        known = self._imported.get(id(tensor))
        if known is None or known.owner() is not tensor:
            known = self._published.get(tensor.data_ptr())
        if known is not None and known.version == tensor._version:
            if is_array_of(known.array, tensor):
                return known.array
        array = self._import(tensor, self._device)
        if self._is_shared(tensor, array):
            self._imported.note(id(tensor), tensor, tensor, array)
        return array

    def remember(self, tensor: torch.Tensor, array: jax.Array) -> None:
        """Takes note of a tensor that was made of an array, if they share memory."""
        if self._is_shared(tensor, array):
            self.forget([tensor])
            self._published.note(tensor.data_ptr(), tensor.untyped_storage(), tensor, array)

    def _import_anew(self, tensor: torch.Tensor, device: Device) -> jax.Array:
        array = import_tensor(tensor, device)
        self._made_of[id(array)] = array
        return array

    def show(self, array: jax.Array, tensor: torch.Tensor) -> None:
        """Takes note of a tensor that was made of an array, for `is_seen`."""
        self._shown[id(array)] = tensor.untyped_storage()

    def is_seen(self, array: jax.Array) -> bool:
        """Whether an array's memory is PyTorch's, or some tensor there still refers to it."""
        return id(array) in self._made_of or id(array) in self._shown

    def is_lent(self, tensor: torch.Tensor) -> bool:
        """Whether an array that was made of a tensor refers to the tensor's memory."""
        known = self._imported.get(id(tensor))
        if known is None or known.owner() is not tensor or known.array.is_deleted():
            return False
        return known.array.unsafe_buffer_pointer() == tensor.data_ptr()

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refers no longer to tensors."""
        for tensor in tensors:
            self._imported.pop(id(tensor), None)

    def _is_shared(self, tensor: torch.Tensor, array: jax.Array) -> bool:
        """Whether they share memory; a copy would not see what is written through `.data`."""
        if not self._shares_memory or tensor.is_inference():
            return False
        return array.unsafe_buffer_pointer() == tensor.data_ptr() != 0


class _Owner(weakref.ref[Any]):
    """A weak reference that knows its key, which costs less than a closure for each."""

    __slots__ = ("key",)
    key: int
