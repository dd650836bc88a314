"""What an optimizer updates in the place of a parameter: a part of it, a wider copy, or both.

    compute copy   what stage programs read: the model's `nn.Parameter`       bfloat16 [4, 3]
    update copy    what the inner optimizer holds instead, if it is another
                     a master, of the parameter's shape                        float32  [4, 3]
                     a piece of a master, flat (ZeRO-1)                        float32  [7]
                     a piece of the parameter itself, flat                     bfloat16 [7]

The compute copy is the truth wherever somebody has written to it, and rounds the master elsewhere:
`renewed` tells the two apart element by element, so no write of the user is missed and no bit of a
master is lost. This file must not know transports, buckets or optimizers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mpxla.device.backend import Buffer
from mpxla.parallel.programs import Programs

__all__ = ["Copies", "Masters", "Range", "UpdateCopy", "in_dtypes", "renewed"]

Range = tuple[int, int]
"""First element and end of a piece, in its flattened parameter."""


@dataclass(frozen=True, eq=False)
class UpdateCopy:
    """What one replica updates of one parameter, where that is not the parameter itself.

    Attributes:
        name: canonical name of the parameter.
        shape: the parameter's.
        extent: which of its elements, flattened; None for all of them in the parameter's shape.
        parameter: stands in for the parameter in the inner optimizer, and has its gradient.
    """

    name: str
    shape: tuple[int, ...]
    extent: Range | None
    parameter: nn.Parameter


def renewed(value: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """The update copy, with what was written to the compute copy `value`, or that part, since."""
    # A comparison of values: writes through `.data` leave no trace that one could ask for. NaN is
    # never equal to itself, and comes from the compute copy then.
    return torch.where(value == copy.to(value.dtype), copy, value.to(copy.dtype))


def _renewal(
    extents: Sequence[Range | None], dtype: torch.dtype, *tensors: torch.Tensor
) -> list[torch.Tensor]:
    """Compute copies, and after them perhaps update copies, to the renewed update copies."""
    values = [
        tensor if extent is None else tensor.reshape(-1)[slice(*extent)]
        for tensor, extent in zip(tensors, extents, strict=False)
    ]
    copies = tensors[len(values) :]
    if not copies:
        # Each a tensor of its own: a piece that is all of a flat parameter would share memory.
        return [value.to(dtype).clone() for value in values]
    return [renewed(value, copy) for value, copy in zip(values, copies, strict=True)]


def _cast(dtypes: Sequence[torch.dtype], *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to(dtype) for t, dtype in zip(tensors, dtypes, strict=True)]


def in_dtypes(
    programs: Programs, tensors: Sequence[torch.Tensor], dtypes: Iterable[torch.dtype]
) -> list[Buffer]:
    """Starts tensors in other types, as masters to compute copies."""
    if not tensors:
        return []
    arguments = programs.backend.adopt(tensors)
    return programs.run("rounding of masters", _cast, (tuple(dtypes),), arguments)


class Copies:
    """Update copies of parameters, of one type: the whole, or the elements of an extent of each."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        extents: Sequence[Range | None],
        dtype: torch.dtype,
        programs: Programs,
    ):
        self.names = tuple(parameters)
        self.copies: dict[str, UpdateCopy] = {}
        self._parameters = list(parameters.values())
        self._settings = tuple(extents), dtype
        self._programs = programs
        values = programs.backend.publish(self.renew())
        self.copies = {
            name: UpdateCopy(name, tuple(parameter.shape), extent, nn.Parameter(value))
            for (name, parameter), extent, value in zip(
                parameters.items(), extents, values, strict=True
            )
        }

    @property
    def _held(self) -> list[nn.Parameter]:
        return [copy.parameter for copy in self.copies.values()]

    def renew(self) -> list[Buffer]:
        """New values of the copies, in their order."""
        if not self._parameters:
            return []
        # Copies of the same type have nothing that their parameters lack.
        is_wide = any(p.dtype != self._settings[1] for p in self._parameters)
        arguments = [*self._parameters, *(self._held if is_wide else ())]
        adopted = self._programs.backend.adopt(arguments)
        return self._programs.run("renewal of update copies", _renewal, self._settings, adopted)


class Masters(Copies):
    """Wide copies of whole parameters, updated alike on every replica."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, programs: Programs
    ):
        super().__init__(parameters, [None] * len(parameters), dtype, programs)

    def publish(self) -> Callable[[], Sequence[Buffer]]:
        """Starts rounding; the result gives the compute copies of `names`."""
        values = in_dtypes(self._programs, self._held, (p.dtype for p in self._parameters))
        return lambda: values
