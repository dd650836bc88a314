"""Programs that take the memory of arguments, where PyTorch sees the device's memory too: on CUDA.

On the CPU XLA copies a donated array by itself if a tensor shares its memory. On CUDA it refuses
one that a tensor was made of, and writes to the memory of one that was made of a tensor. So there
programs get copies of both.
"""

from collections.abc import Collection, Sequence

import jax
import torch

from mpxla.device.pjrt.arrays import Device, ImportCache
from mpxla.device.pjrt.executable import PjrtExecutable

__all__ = ["SparingExecutable"]


class SparingExecutable:
    """A program that leaves alone what somebody sees; see `Executable`.

    Args:
        program: may take arguments as they are.
        donated: which ones.
        imports: knows what shares memory with tensors.
        device: where it runs.
    """

    def __init__(
        self,
        program: PjrtExecutable,
        donated: Collection[int],
        imports: ImportCache,
        device: Device,
    ):
        self.name, self.is_random = program.name, program.is_random
        self._program = program
        self._donated = frozenset(donated)
        self._imports = imports
        self._device = device

    def __call__(
        self, arguments: Sequence[jax.Array], seed: jax.Array | None = None
    ) -> list[jax.Array]:
        """Starts the program; see `PjrtExecutable`."""
        if torch.cuda.is_initialized():  # it may still read what it refers to no longer
            torch.cuda.current_stream().synchronize()
        given = [
            self._spared(value) if i in self._donated else value
            for i, value in enumerate(arguments)
        ]
        return self._program(given, seed)

    def _spared(self, array: jax.Array) -> jax.Array:
        if not self._imports.is_seen(array):
            return array
        return jax.device_put(array, self._device, may_alias=False)
