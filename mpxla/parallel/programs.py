"""Small programs over gradients and parameters, compiled when they first run on given shapes."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from mpxla.device.backend import Backend, Buffer, Executable
from mpxla.log import warn_once
from mpxla.stage.program import compile_function

__all__ = ["Programs", "wide_dtype"]

_MAX_PROGRAMS = 256
"""A model uses some dozens; there are more where shapes or settings change in each step."""
_MAX_NUMBERS = 8


def wide_dtype(backend: Backend) -> torch.dtype:
    """What counts, rates and norms are computed in on a device.

    They are numbers in Python, of 64 bits: `1 - beta2 ** step` in 32 bits is off by 6e-5 in the
    first step. Neuron has no such numbers.
    """
    return torch.float64 if backend.has_doubles else torch.float32


class Programs:
    """Compiles and runs functions, each once for its settings and the specs of its arguments.

    Attributes:
        number: gives a number of a type on the device; the last few stay there.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self._known: dict[Any, Executable] = {}
        self.number = lru_cache(_MAX_NUMBERS)(self._number)

    def run(
        self,
        name: str,
        function: Callable[..., Sequence[torch.Tensor]],
        settings: tuple[Any, ...],
        arguments: Sequence[Buffer],
        donated: Sequence[int] = (),
    ) -> list[Buffer]:
        """Starts a program; its results are still being computed.

        The function takes the settings, which are hashable, and a tensor for every buffer; it gives
        tensors that share no memory. Results may take the memory of arguments that are donated.
        """
        specs = tuple(self.backend.spec(argument) for argument in arguments)
        key = (function, settings, specs, tuple(donated))
        program = self._known.pop(key, None)
        if program is None:
            call = partial(function, *settings)
            program = compile_function(self.backend, name, call, specs, donated=donated)
        self._known[key] = program  # the last used is the last in the dictionary
        if len(self._known) > _MAX_PROGRAMS:
            del self._known[next(iter(self._known))]
            warn_once(
                f"{name} is forgotten",
                f"more than {_MAX_PROGRAMS} programs over gradients and parameters were compiled, "
                f"the last one for {name}; those that were not used for longest are forgotten. "
                f"Clip and sum the same parameters in every step.",
            )
        return program(arguments)

    def _number(self, value: float, dtype: torch.dtype) -> Buffer:
        return self.backend.put([torch.tensor(value, dtype=dtype)])[0]
