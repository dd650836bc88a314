"""Where modules hold tensors that steps read and write, besides parameters.

In buffers, and in attributes of parameters, as binary networks do (`weight.org`). For a step the
latter are buffers of the module that has the parameter, under names like `weight__org`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpxla.graph.capture.sparse import is_sparse

__all__ = [
    "Attribute",
    "HeldTensor",
    "attributes_of",
    "fix_mask",
    "is_constant",
    "may_decide",
    "set_by_users",
]


_DECIDES = "_mpxla_decides"
_MOST_INTEGERS = 64  # ends of slices are few; tables of places need no values in a capture


def is_constant(buffer: Any) -> bool:
    """Whether a buffer is read on the host, where it stays: a sparse one, or one that decides.

    `x[:, self.mask]` has as many columns as the mask has ones: a capture has to know them.
    """
    is_fixed = isinstance(buffer, torch.Tensor) and vars(buffer).get(_DECIDES, False)
    return is_fixed or is_sparse(buffer)


def may_decide(buffer: torch.Tensor) -> bool:
    """Whether it is a mask, or a few integers, that nobody has tried as a constant.

    Integers may be the ends of slices. A single one is a counter, more often than not.
    """
    most = float("inf") if buffer.dtype is torch.bool else _MOST_INTEGERS
    is_exact = not (buffer.is_floating_point() or buffer.is_complex())
    return is_exact and 1 < buffer.numel() <= most and _DECIDES not in vars(buffer)


def fix_mask(mask: torch.Tensor, *, decides: bool = True) -> None:
    """Makes a mask a constant, or a buffer again, for good."""
    vars(mask)[_DECIDES] = decides


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A place with a tensor, or none for now.

    Attributes:
        module: that has it.
        key: its name as a buffer of the module.
    """

    module: nn.Module
    key: str

    @property
    def keys(self) -> tuple[str, ...]:
        """All names as buffers of the module."""
        return (self.key,)

    @property
    def table(self) -> dict[str, Any]:
        """Where it is."""
        return self.module._buffers  # pyright: ignore[reportPrivateUsage]

    @property
    def slot(self) -> str:
        """Its name there."""
        return self.key

    @property
    def place(self) -> tuple[int, str]:
        """Equal for the same place."""
        return id(self.module), self.key

    @property
    def is_left(self) -> bool:
        """Whether the module has the place no more."""
        return self.get() is None

    def get(self) -> torch.Tensor | None:
        """What is there."""
        return self.table.get(self.slot)

    def put(self, value: torch.Tensor) -> None:
        """Puts another tensor there, if there is one."""
        if self.slot in self.table:
            self.table[self.slot] = value


@dataclass(frozen=True, eq=False)
class Attribute(HeldTensor):
    """An attribute of a parameter.

    Attributes:
        parameter: its name in the module.
        name: of the attribute.
    """

    parameter: str
    name: str

    @property
    def owner(self) -> Any:
        """The parameter."""
        return self.module._parameters[self.parameter]  # pyright: ignore[reportPrivateUsage]

    @property
    def table(self) -> dict[str, Any]:
        """The attributes of the parameter."""
        return vars(self.owner)

    @property
    def slot(self) -> str:
        """The name among them."""
        return self.name

    @property
    def place(self) -> tuple[int, str]:
        """Several modules may have the parameter."""
        return id(self.owner), self.name

    def start(self) -> None:
        """Gives the parameter the attribute, as a copy of itself."""
        own = self.owner.detach()
        copy = torch.empty_like(own, device="meta") if own.is_meta else own.clone()
        setattr(self.owner, self.name, copy)


def attributes_of(module: nn.Module) -> Iterator[Attribute]:
    """Those of a module's own parameters that users have set."""
    for key, parameter in module._parameters.items():  # pyright: ignore[reportPrivateUsage]
        if parameter is not None and parameter.__dict__:
            for name, value in set_by_users(parameter).items():
                if isinstance(value, torch.Tensor):
                    yield Attribute(module, f"{key}__{name}", key, name)


def set_by_users(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes of a parameter that are neither torch's nor this library's."""
    return {k: v for k, v in vars(parameter).items() if not k.startswith(("_is_param", "_mpxla"))}
