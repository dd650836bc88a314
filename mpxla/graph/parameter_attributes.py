"""Tensors that models keep as attributes of parameters, as binary networks do: `weight.org`.

For a step they are buffers of the module that has the parameter, under names like `weight__org`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpxla.graph.sparse import is_sparse

__all__ = ["Attribute", "NewAttributesError", "attributes_of", "held_tensors"]


@dataclass(frozen=True)
class Attribute:
    """A tensor that is an attribute of a parameter.

    Attributes:
        module: that has the parameter.
        parameter: its name in the module.
        name: of the attribute.
    """

    module: nn.Module
    parameter: str
    name: str

    @property
    def key(self) -> str:
        """Its name as a buffer of the module."""
        return f"{self.parameter}__{self.name}"

    @property
    def owner(self) -> Any:
        """The parameter."""
        return self.module._parameters[self.parameter]  # pyright: ignore[reportPrivateUsage]

    def start(self) -> None:
        """Gives the parameter the attribute, as a copy of itself."""
        own = self.owner.detach()
        copy = torch.empty_like(own, device="meta") if own.is_meta else own.clone()
        setattr(self.owner, self.name, copy)


class NewAttributesError(Exception):
    """A step function gives parameters attributes that are copies of them."""

    def __init__(self, attributes: list[Attribute]):
        super().__init__(", ".join(attribute.key for attribute in attributes))
        self.attributes = attributes


def attributes_of(module: nn.Module) -> Iterator[Attribute]:
    """Those of a module's own parameters; names with an underscore are of libraries."""
    for key, parameter in module._parameters.items():  # pyright: ignore[reportPrivateUsage]
        if parameter is not None and parameter.__dict__:
            for name, value in parameter.__dict__.items():
                if isinstance(value, torch.Tensor) and not name.startswith("_"):
                    yield Attribute(module, key, name)


def held_tensors(module: nn.Module) -> Iterator[tuple[str, Any, str, torch.Tensor]]:
    """(name, owner, name there, tensor) of a module's own buffers and of such attributes.

    Sparse ones are constants: they are read on the host, where they stay.
    """
    for key, buffer in module._buffers.items():  # pyright: ignore[reportPrivateUsage]
        if buffer is not None and not is_sparse(buffer):
            yield key, module, key, buffer
    for found in attributes_of(module):
        yield found.key, found.owner, found.name, vars(found.owner)[found.name]
