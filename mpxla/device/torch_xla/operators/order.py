"""Running maxima and order statistics, in operators that the device has.

Which element is meant is found without a derivative; its value is then gathered.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ORDER_STATISTICS"]

_aten = torch.ops.aten


def _shifted(values: torch.Tensor, count: int, fill: float) -> torch.Tensor:
    """[..., N] moved to the right by `count`, filled from the left."""
    gap = values.new_full((*values.shape[:-1], count), fill)
    return torch.cat([gap, values[..., : values.shape[-1] - count]], -1)


def _running(is_max: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`cummax` or `cummin`: in log2(N) steps, each over twice as many elements."""

    def run(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not x.dim():
            return x.clone(), torch.zeros_like(x, dtype=torch.int64)
        rows = x.movedim(dim, -1)
        best = rows.detach() if is_max else -rows.detach()
        length = rows.shape[-1]
        place = torch.arange(length, device=x.device).expand(rows.shape)
        step = 1
        while step < length:
            before, place_before = _shifted(best, step, -torch.inf), _shifted(place, step, -1)
            # Of equal ones the later; a not-a-number stays.
            is_before = (place_before >= 0) & ~(best >= before) & ~best.isnan() | before.isnan()
            best = torch.where(is_before, before, best)
            place = torch.where(is_before, place_before, place)
            step *= 2
        return rows.gather(-1, place).movedim(-1, dim), place.movedim(-1, dim)

    return run


def _logcumsumexp(x: torch.Tensor, dim: int) -> torch.Tensor:
    if not x.dim():
        return x.clone()
    sums = x.movedim(dim, -1)
    step = 1
    while step < sums.shape[-1]:
        added = torch.logaddexp(sums[..., step:], sums[..., :-step])
        sums = torch.cat([sums[..., :step], added], -1)
        step *= 2
    return sums.movedim(-1, dim)


def _middle(rows: torch.Tensor, ignores_nan: bool) -> torch.Tensor:
    """Place [..., 1] of the lower median of [..., N]; of a not-a-number, if there is one."""
    places = rows.detach().argsort(-1)
    is_number = ~rows.detach().isnan()
    counts = is_number.sum(-1, keepdim=True)
    middle = (counts - 1).clamp_min(0) // 2
    if not ignores_nan:
        last = rows.shape[-1] - 1
        middle = torch.where(counts > last, middle, last)  # sorting puts them at the end
    return places.gather(-1, middle)


def _median_along(ignores_nan: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def median(
        x: torch.Tensor, dim: int, keepdim: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not x.dim():
            return x.clone(), torch.zeros_like(x, dtype=torch.int64)
        rows = x.movedim(dim, -1)
        place = _middle(rows, ignores_nan)
        found = [part.movedim(-1, dim) for part in (rows.gather(-1, place), place)]
        values, indices = found if keepdim else (part.squeeze(dim) for part in found)
        return values, indices

    return median


def _median_of_all(ignores_nan: bool) -> Callable[..., torch.Tensor]:
    def median(x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten()
        value = flat.detach().gather(0, _middle(flat, ignores_nan))
        is_it = (flat == value) | (flat.isnan() & value.isnan())
        # The value, whose gradient all elements that are equal to it share, as in torch.
        share = torch.where(is_it, flat - flat.detach(), 0).sum() / is_it.sum()
        return value.squeeze(0) + share

    return median


ORDER_STATISTICS: dict[Any, Callable[..., Any]] = {
    _aten.cummax.default: _running(True),
    _aten.cummin.default: _running(False),
    _aten.logcumsumexp.default: _logcumsumexp,
    _aten.median.default: _median_of_all(False),
    _aten.median.dim: _median_along(False),
    _aten.nanmedian.default: _median_of_all(True),
    _aten.nanmedian.dim: _median_along(True),
}
"""Replaced before differentiation."""
