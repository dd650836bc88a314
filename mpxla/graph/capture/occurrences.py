"""`torch.bincount` and `torch.unique` as operators with shapes that a captured step can have.

The first gets one place for each value below a number, where PyTorch's has more places if a value
is greater. The second chooses the first of equal values by a mask. This module must not know how
values are known.
"""

import torch

__all__ = ["are_below", "counted", "distinct", "distinct_in_turn"]


def counted(input: torch.Tensor, weights: torch.Tensor | None, size: int) -> torch.Tensor:
    """`torch.bincount` with a number of places; values beyond are counted at the ends."""
    places = input.long().clamp(0, size - 1)
    if weights is None:
        weights = torch.ones_like(places)
    elif weights.dtype is not torch.float32:
        weights = weights.double()
    return torch.zeros(size, dtype=weights.dtype).scatter_add(0, places, weights.detach())


def are_below(input: torch.Tensor, size: int) -> torch.Tensor:
    """Whether all values have a place, bool []."""
    return ((input >= 0) & (input < size)).all()


def distinct(input: torch.Tensor, return_inverse: bool, return_counts: bool) -> object:
    """`torch.unique` of all elements."""
    ordered, order = input.detach().flatten().sort(stable=True)
    found, number, *counts = _found(ordered, return_counts)
    inverse = torch.empty_like(number).scatter(0, order, number).view(input.shape)
    return _returned(found, [inverse] * return_inverse + counts)


def distinct_in_turn(input: torch.Tensor, return_inverse: bool, return_counts: bool) -> object:
    """`torch.unique_consecutive` of all elements."""
    found, number, *counts = _found(input.detach().flatten(), return_counts)
    return _returned(found, [number.view(input.shape)] * return_inverse + counts)


def _found(values: torch.Tensor, return_counts: bool) -> list[torch.Tensor]:
    """The first of equal neighbours, the number of its one for each value, and how many there are
    of each.
    """
    is_first = torch.cat([torch.ones_like(values[:1], dtype=torch.bool), values[1:] != values[:-1]])
    found, number = values[is_first], is_first.cumsum(0) - 1
    if not return_counts:
        return [found, number]
    counts = torch.zeros_like(found, dtype=torch.int64)
    return [found, number, counts.index_add(0, number, torch.ones_like(number))]


def _returned(found: torch.Tensor, others: list[torch.Tensor]) -> object:
    return (found, *others) if others else found
