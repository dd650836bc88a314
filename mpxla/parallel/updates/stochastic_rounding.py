"""Stochastic rounding of updates: bfloat16 parameters without float32 masters.

Rounded to the nearest, an update below half an ulp is lost, and so is a small change of a moving
average. Here an update is computed in float32 and rounded up as often as it is near to the upper
neighbor, so that the mean of the results is the exact value (Gupta et al., "Deep learning with
limited numerical precision", 2015, section 4; Neuron's hardware does it for every operation).

    noise of an element = hash(seed, number of the update, name of the parameter, its index)

A hash and no random operator: replicas, pieces of ZeRO-1, stages that share a weight, every backend
and every topology round an element alike. This file must not know optimizers.
"""

import hashlib
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mpxla.errors import ConfigError

__all__ = [
    "Noise",
    "Origin",
    "StochasticRounding",
    "check_parameters",
    "is_narrow",
    "origin_of_state",
    "rounded",
    "rounded_values",
]

_ROW = 1024
"""Elements that are numbered together: torch_xla makes a constant of `arange`, so it has to be
short."""
_SPLIT = 2.0**16 + 1
_LARGEST = 2.0**100
"""Above it `_SPLIT` times a value would overflow; no parameter is there."""


class Origin(NamedTuple):
    """Where the elements of a tensor are in the model."""

    name: str
    """Of the parameter."""
    start: int
    """Index of the first of them in the flattened parameter."""


def origin_of_state(
    origin: Origin, key: str, value: torch.Tensor, parameter: torch.Tensor
) -> Origin:
    """Where the noise of a state comes from: that of its parameter, if the elements correspond."""
    return origin if value.shape == parameter.shape else Origin(f"{origin.name}.{key}", 0)


class StochasticRounding:
    """The seed and the number of updates of one optimizer.

    Attributes:
        seed: of the noise; None as long as the ranks have not agreed on one.
    """

    def __init__(self, seed: int | None = None):
        self.seed = seed
        self._num_updates = 0

    def advance(self) -> None:
        """Counts an update; every rank calls it for each, also one without parameters."""
        self._num_updates += 1

    def key(self) -> torch.Tensor:
        """What the noise of the current update is made from, int32 [2], on the host."""
        text = f"{self.seed} {self._num_updates}".encode()
        words = struct.unpack("<ii", hashlib.blake2b(text, digest_size=8).digest())
        return torch.tensor(words, dtype=torch.int32)

    def state_dict(self) -> dict[str, Any]:
        """Seed and number of updates."""
        return {"seed": self.seed, "num_updates": self._num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on as another one would."""
        self.seed, self._num_updates = state["seed"], int(state["num_updates"])


def check_parameters(parameters: Sequence[nn.Parameter]) -> None:
    """Checks that an optimizer has something to round.

    Raises:
        ConfigError: parameters are float16, or none is bfloat16.
    """
    advice = (
        "Set bf16: True, or convert the model by model.to(torch.bfloat16) before "
        "smp.DistributedModel; or remove stochastic_rounding."
    )
    dtypes = {parameter.dtype for parameter in parameters}
    if torch.float16 in dtypes:
        raise ConfigError(
            "stochastic_rounding: True is for bfloat16, and this optimizer holds float16 "
            f"parameters, whose small values it would lose. {advice}"
        )
    if parameters and torch.bfloat16 not in dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(
            "stochastic_rounding: True rounds updates of bfloat16 parameters, and all parameters "
            f"of this optimizer are {names}. {advice}"
        )


def is_narrow(tensor: torch.Tensor) -> bool:
    """Whether a tensor of an update is computed with in float32 and rounded."""
    return tensor.dtype is torch.bfloat16


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """A bijection of int32 whose outputs look random.

    Constants: Wellons, "Prospecting for hash functions", 2018 (lowbias32).
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 16)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """To the right; the mask takes away the copies of the sign that come in."""
    # A tensor, because torch_xla 2.9 makes an int64 of a number and cannot shift by that.
    places = torch.full((), by, dtype=torch.int32, device=bits.device)
    return torch.bitwise_right_shift(bits, places) & (2 ** (32 - by) - 1)


class Noise:
    """Numbers in [0, 1) for the elements of one update, which has a key, int32 [2]."""

    def __init__(self, key: torch.Tensor):
        self._key = key
        self._known: dict[tuple[Origin, int], torch.Tensor] = {}

    def of(self, origin: Origin, shape: Sequence[int]) -> torch.Tensor:
        """Multiples of 2**-24, float32, of the given shape.

        A parameter and its state share them, which halves the program: each is unbiased by itself.
        """
        count = torch.Size(shape).numel()
        if (origin, count) not in self._known:
            self._known[origin, count] = self._drawn(origin, count)
        return self._known[origin, count].view(tuple(shape))

    def _drawn(self, origin: Origin, count: int) -> torch.Tensor:
        first, offset = divmod(origin.start, _ROW)
        last = -(-(origin.start + count) // _ROW)
        salt = zlib.crc32(origin.name.encode()) - 2**31
        device = self._key.device
        rows = torch.arange(first, last, dtype=torch.int32, device=device)
        rows = _mixed(_mixed(rows + self._key[0]) ^ self._key[1]) + salt
        columns = torch.arange(_ROW, dtype=torch.int32, device=device)
        bits = _mixed(_mixed(rows)[:, None] + columns).reshape(-1)[offset : offset + count]
        return (bits & 0xFFFFFF).float() * 2.0**-24


def _eight_bits(value: torch.Tensor) -> torch.Tensor:
    """Rounds to the 8 significant bits of bfloat16, in float32.

    By arithmetic (Dekker, "A floating-point technique for extending the available precision",
    1971): XLA may leave out a conversion to bfloat16 and back, and torch_xla 2.9 cannot look at the
    bits of a float.
    """
    large = value * _SPLIT
    return large - (large - value)


def rounded(value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """float32 in bfloat16, each value as one of its two neighbors there; their mean is the value.

    Noise is in [0, 1). Infinities, NaN and what is beyond 2**100 are rounded to the nearest.
    """
    near = _eight_bits(value)
    # 1.25 of half an ulp at the most: rounds to the next number on the other side of the value.
    step = torch.where(near.abs() > value.abs(), -1.25 * 2.0**-8, 1.25 * 2.0**-8)
    other = _eight_bits(near + near * step)
    part = (value - near) / (other - near)  # 0 / 0 for zeros, which is not above any noise
    found = torch.where(part > noise, other, near)
    return torch.where(value.abs() < _LARGEST, found, value).to(torch.bfloat16)


def rounded_values(
    origins: Sequence[Origin], key: torch.Tensor, *values: torch.Tensor
) -> list[torch.Tensor]:
    """Values in float32, each from its origin, to values in bfloat16; see `rounded`."""
    noise = Noise(key)
    return [
        rounded(value, noise.of(origin, value.shape))
        for value, origin in zip(values, origins, strict=True)
    ]
