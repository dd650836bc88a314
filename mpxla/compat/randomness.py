"""Random numbers of the device by CUDA's names.

CUDA's generator is another one than the host's: `torch.cuda.manual_seed` leaves data shuffling and
the initialization of weights alone. Here, a host generator of its own gives the seeds of random
operators in step functions, and XLA's state those of operators outside.
"""

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch.random import fork_rng

from mpxla.compat.devices import device_backend
from mpxla.runtime.seeds import use_generator

__all__ = ["DeviceRandomness"]


class DeviceRandomness:
    """The generator behind the names, which steps draw from in its block."""

    def __init__(self) -> None:
        self._generator = torch.Generator()

    def __enter__(self) -> None:
        use_generator(self._generator)

    def __exit__(self, *_: object) -> None:
        use_generator(None)

    def functions(self) -> dict[str, Any]:
        """Name in `torch.cuda` -> its replacement."""
        return {
            "manual_seed": self._seed,
            "manual_seed_all": self._seed,
            "seed": self._draw_seed,
            "seed_all": self._draw_seed,
            "initial_seed": self._generator.initial_seed,
            "get_rng_state": self._state,
            "get_rng_state_all": lambda: [self._state()],
            "set_rng_state": self._set_state,
            "set_rng_state_all": lambda states: self._set_state(states[0]),
            # torch.manual_seed asks it, and passes CUDA over in some forked processes.
            "_is_in_bad_fork": lambda: False,
        }

    @contextlib.contextmanager
    def fork(
        self,
        devices: Iterable[Any] | None = None,
        enabled: bool = True,
        *names: str,
        device_type: str = "cuda",
    ) -> Generator[None]:
        """`torch.random.fork_rng`, which cannot ask torch for a module of XLA's generators."""
        if device_type not in ("cuda", "xla"):
            with fork_rng(devices, enabled, *names, device_type=device_type):
                yield
            return
        is_device_forked = enabled and (devices is None or len(list(devices)) > 0)
        state, device_state = self._state(), device_backend().random_state()
        with fork_rng([], enabled, device_type="cpu"):
            try:
                yield
            finally:
                if is_device_forked:
                    self._generator.set_state(state)
                    device_backend().set_random_state(device_state)

    def _seed(self, seed: int) -> None:
        self._generator.manual_seed(int(seed))
        device_backend().set_random_state(int(seed) & 0xFFFFFFFF)

    def _draw_seed(self) -> None:
        self._seed(torch.Generator().seed())

    def _state(self, device: Any = None) -> torch.Tensor:
        return self._generator.get_state()

    def _set_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Restores the generator; XLA's own state follows from it."""
        self._generator.set_state(state.cpu())
        follower = torch.Generator()
        follower.set_state(state.cpu())
        device_backend().set_random_state(
            int(torch.randint(1 << 32, (1,), generator=follower).item())
        )
