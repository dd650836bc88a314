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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mpxla.device.backend import Buffer
from mpxla.parallel.programs import Programs

__all__ = ["Masters", "Range", "UpdateCopy", "renewal", "renewed", "rounding"]

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
    """The update copy, with the elements that were written to the compute copy since.

    Args:
        value: the compute copy, or the part of it.
        copy: its update copy so far, of the same shape and perhaps wider.
    """
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


def rounding(dtypes: Sequence[torch.dtype], *masters: torch.Tensor) -> list[torch.Tensor]:
    """Tensors in other types, as masters to compute copies."""
    return [m.to(dtype) for m, dtype in zip(masters, dtypes, strict=True)]


def renewal(
    programs: Programs,
    parameters: Sequence[nn.Parameter],
    extents: Sequence[Range | None],
    dtype: torch.dtype,
    copies: Sequence[UpdateCopy] = (),
) -> list[Buffer]:
    """Values of update copies.

    Args:
        programs: compiles and runs.
        parameters: the compute copies.
        extents: which part of each.
        dtype: of the update copies.
        copies: the copies so far, if there are some.
    """
    backend = programs.backend
    # Copies of the same type have nothing that their parameters lack.
    wide = [c.parameter for c in copies if any(p.dtype != dtype for p in parameters)]
    arguments = backend.adopt([*parameters, *wide])
    return programs.run("renewal of update copies", _renewal, (tuple(extents), dtype), arguments)


class Masters:
    """Wide copies of whole parameters, updated alike on every replica.

    Args:
        parameters: the compute copies, by name.
        dtype: of the masters.
        programs: compiles and runs.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, programs: Programs
    ):
        self.names = tuple(parameters)
        self._parameters = list(parameters.values())
        self._dtype = dtype
        self._programs = programs
        self._extents = [None] * len(parameters)
        values = programs.backend.publish(renewal(programs, self._parameters, self._extents, dtype))
        self.copies = {
            name: UpdateCopy(name, tuple(value.shape), None, nn.Parameter(value))
            for name, value in zip(parameters, values, strict=True)
        }

    def renew(self) -> list[Buffer]:
        """New values of the copies, in their order."""
        held = list(self.copies.values())
        return renewal(self._programs, self._parameters, self._extents, self._dtype, held)

    def publish(self) -> Callable[[], Sequence[Buffer]]:
        """Starts rounding; the result gives the compute copies of `names`."""
        held = [copy.parameter for copy in self.copies.values()]
        dtypes = tuple(parameter.dtype for parameter in self._parameters)
        arguments = self._programs.backend.adopt(held)
        values = self._programs.run("rounding of masters", rounding, (dtypes,), arguments)
        return lambda: values
