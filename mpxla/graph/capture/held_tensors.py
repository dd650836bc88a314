"""All places where a module holds tensors that steps read and write, besides parameters."""

from collections.abc import Iterator

from torch import nn

from mpxla.graph.capture.carried import carried_of
from mpxla.graph.capture.tensor_places import HeldTensor, attributes_of, is_constant

__all__ = ["held_names", "held_tensors"]


def held_names(module: nn.Module) -> Iterator[str]:
    """Names of a module's own buffers and of attributes of its parameters, without constants."""
    for key, buffer in module._buffers.items():  # pyright: ignore[reportPrivateUsage]
        if buffer is not None and not is_constant(buffer):
            yield key
    for found in attributes_of(module):
        yield found.key


def held_tensors(module: nn.Module) -> Iterator[HeldTensor]:
    """Places of these, and of tensors in attributes that steps carry."""
    for key, buffer in module._buffers.items():  # pyright: ignore[reportPrivateUsage]
        if buffer is not None and not is_constant(buffer):
            yield HeldTensor(module, key)
    yield from attributes_of(module)
    for name, carried in carried_of(vars(module)).items():
        if carried.module is module and carried.name == name:
            yield from carried.tensors()
