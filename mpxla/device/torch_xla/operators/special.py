"""The gamma function's logarithm and its derivative, which torch_xla 2.9 does not lower.

Both are Lanczos' approximation with g = 7, as XLA's client library has it. Errors are those of
float32.
"""

import math

import torch

__all__ = ["digamma", "lgamma"]

_G = 7.0
_FIRST = 0.99999999999980993227684700473478
_OTHERS = (
    676.520368121885098567009190444019,
    -1259.13921672240287047156078755283,
    771.3234287776530788486528258894,
    -176.61502916214059906584551354,
    12.507343278686904814458936853,
    -0.13857109526572011689554707,
    9.984369578019570859563e-6,
    1.50563273514931155834e-7,
)


def _reflected(x: torch.Tensor) -> torch.Tensor:
    """z = x - 1, or -x where the function is computed at 1 - x."""
    return torch.where(x < 0.5, -x, x - 1)


def lgamma(x: torch.Tensor) -> torch.Tensor:
    """Logarithm of the gamma function's magnitude, elementwise."""
    z = _reflected(x)
    total = torch.full_like(z, _FIRST)
    for index, factor in enumerate(_OTHERS, start=1):
        total = total + factor / (z + index)
    t = z + (_G + 0.5)
    log_t = math.log(_G + 0.5) + torch.log1p(z / (_G + 0.5))
    log_y = (z + 0.5 - t / log_t) * log_t + 0.5 * math.log(2 * math.pi) + torch.log(total)
    rest = x.abs() - x.abs().floor()
    sine = torch.log(torch.sin(math.pi * torch.where(rest > 0.5, 1 - rest, rest)))
    mirrored = torch.where(sine.isfinite(), math.log(math.pi) - sine - log_y, -sine)
    return torch.where(x.isinf(), torch.inf, torch.where(x < 0.5, mirrored, log_y))


def digamma(x: torch.Tensor) -> torch.Tensor:
    """Derivative of `lgamma`, elementwise."""
    z = _reflected(x)
    total, slope = torch.full_like(z, _FIRST), torch.zeros_like(z)
    for index, factor in enumerate(_OTHERS, start=1):
        total = total + factor / (z + index)
        slope = slope - factor / ((z + index) * (z + index))
    t = z + (_G + 0.5)
    log_t = math.log(_G + 0.5) + torch.log1p(z / (_G + 0.5))
    y = log_t + slope / total - _G / t
    angle = math.pi * (x + (x + 0.5).floor().abs())
    mirrored = y - math.pi * torch.cos(angle) / torch.sin(angle)
    values = torch.where(x < 0.5, mirrored, y)
    values = torch.where((x < 0) & (x == x.floor()), torch.nan, values)
    return torch.where(x == 0, -1 / x, values)
