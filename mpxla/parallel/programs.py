"""Small programs over gradients and parameters, compiled when they first run on given shapes."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from mpxla.device.backend import Backend, Buffer, Executable

__all__ = ["Programs"]


class Programs:
    """Compiles and runs modules, each once for its settings and the specs of its arguments.

    Args:
        backend: of this rank's device.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self._known: dict[Any, Executable] = {}

    def run(
        self,
        name: str,
        kind: type[nn.Module],
        settings: tuple[Any, ...],
        arguments: Sequence[Buffer],
    ) -> list[Buffer]:
        """Starts a program; its results are still being computed.

        Args:
            name: for messages.
            kind: class of the module, which takes buffers and gives a list of tensors.
            settings: its constructor's arguments, hashable.
            arguments: what it is called with.
        """
        specs = tuple(self.backend.spec(argument) for argument in arguments)
        key = (kind, settings, specs)
        if key not in self._known:
            self._known[key] = self.backend.compile(name, kind(*settings), specs)
        return self._known[key](arguments)
