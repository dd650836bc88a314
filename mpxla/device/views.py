"""Views of a tensor that a script holds, such as `p.detach()`: they follow what is assigned to it.

In PyTorch an optimizer writes to the memory of a parameter. Programs give their results memory of
their own, which parameters exchange for the old one, as that costs nothing. Where somebody sees the
old memory, it is written to instead.
"""

import functools
from collections.abc import Iterable, Sequence

import torch

from mpxla.stage.spec import TensorSpec

__all__ = ["TensorBuffers", "assign", "num_holders"]


def num_holders(tensor: torch.Tensor) -> int:
    """How many tensors refer to the memory of one: itself, and its views."""
    if tensor.is_meta or not tensor.numel():
        return 1
    return _use_count(tensor) - _num_own()


def _use_count(tensor: torch.Tensor) -> int:
    # The storage as an object of Python's would be counted: it is gone by the next line.
    address = tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    return torch._C._storage_Use_Count(address)  # pyright: ignore[reportPrivateUsage]


@functools.cache
def _num_own() -> int:
    """How many more are counted than there are: newer versions keep that object (torch 2.13)."""
    return _use_count(torch.empty(1)) - 1


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def assign(tensor: torch.Tensor, value: torch.Tensor, is_seen: bool) -> bool:
    """Gives a tensor other values; it stays the same object.

    Args:
        tensor: a user's tensor, which no program that still runs reads if it is seen.
        value: of any memory, which becomes the tensor's if nobody sees that.
        is_seen: whether the tensor has views that somebody holds.

    Returns:
        Whether the tensor has the memory of the value now.
    """
    if not is_seen or _kind(tensor) != _kind(value):
        tensor.data = value
        return True
    with torch.no_grad():
        tensor.copy_(value)
    return False


class TensorBuffers:
    """A part of `Backend`, for backends whose buffers are the tensors that users see."""

    builds_late = False

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing to do: it refers to none."""

    def publish(self, buffers: Sequence[torch.Tensor], is_held: bool = False) -> list[torch.Tensor]:
        """Buffers are what users see."""
        return list(buffers)

    def assign(self, tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Exchanges the memory of tensors, or writes to it where somebody sees that."""
        for tensor, buffer in zip(tensors, buffers, strict=True):
            assign(tensor, buffer, self.has_views(tensor))

    def has_views(self, tensor: torch.Tensor) -> bool:
        """Whether something beside the tensor refers to its memory."""
        return num_holders(tensor) > 1

    def spec(self, buffer: torch.Tensor) -> TensorSpec:
        """Shape and dtype of a buffer."""
        return TensorSpec.of(buffer)
