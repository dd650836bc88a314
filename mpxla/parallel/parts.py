"""The parts of divided parameters on one rank, and what optimizers update in their place.

Programs take a part in the parameter's type; an optimizer updates the same tensor, or a wider copy
of it (a master). This file must not know which ranks have the other parts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from mpxla.device.backend import Buffer
from mpxla.parallel.programs import Programs
from mpxla.parallel.update_copy import Rounding, UpdateCopy
from mpxla.runtime.state import ModelState

__all__ = ["Parts"]


class Parts:
    """This rank's parts of divided parameters, and what optimizers update in their place.

    Args:
        state: of the model, which has the parts.
        names: of the parameters.
        dtype_of: in what each is updated.
        programs: compiles and runs.
    """

    def __init__(
        self,
        state: ModelState,
        names: Sequence[str],
        dtype_of: Callable[[str], torch.dtype],
        programs: Programs,
    ):
        self.names = tuple(names)
        self._state = state
        self._programs = programs
        self.copies = {name: self._copy(name, dtype_of(name)) for name in names}

    def _copy(self, name: str, dtype: torch.dtype) -> UpdateCopy:
        part, shard = self._state.parts[name], self._state.shards[name]
        if part.dtype != dtype:
            (wide,) = self._round([part], [dtype])
            (value,) = self._programs.backend.publish([wide])
            part = nn.Parameter(value, requires_grad=part.requires_grad)
        return UpdateCopy(name, shard.whole, shard.extent, part)

    def renew(self) -> list[torch.Tensor]:
        """Values of the copies: nobody but the store writes to parts."""
        return [copy.parameter.data for copy in self.copies.values()]

    def publish(self) -> Callable[[], Sequence[Buffer]]:
        """Starts rounding masters; the result gives the parts of `wide_names`."""
        dtypes = [self._state.parts[name].dtype for name in self.wide_names]
        masters = [self.copies[name].parameter for name in self.wide_names]
        values = self._round(masters, dtypes)
        return lambda: values

    @property
    def wide_names(self) -> list[str]:
        """Those of the parameters that have masters."""
        held = self._state.parts
        return [name for name, copy in self.copies.items() if copy.parameter is not held[name]]

    def _round(
        self, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[Buffer]:
        if not tensors:
            return []
        arguments = self._programs.backend.adopt(list(tensors))
        return self._programs.run("rounding of masters", Rounding, (tuple(dtypes),), arguments)
