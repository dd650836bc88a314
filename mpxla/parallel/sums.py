"""Sums and parts of gradients on the device, as small programs that are compiled at first use.

Gradients are buffers of the backend here: nothing computes with them but programs.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from math import prod

import torch

from mpxla.device.backend import Buffer
from mpxla.parallel.programs import Programs

__all__ = ["cut_gradients", "sum_gradients"]

Cut = tuple[int, tuple[int, ...]]
"""First element of a part in a flat tensor, and the part's shape."""


def _sums(
    counts: Sequence[int], factor: float, dtypes: Sequence[torch.dtype], *terms: torch.Tensor
) -> list[torch.Tensor]:
    """Groups of terms, one after the other, to the sum of each group, every term scaled."""
    rest, sums = iter(terms), []
    for count, dtype in zip(counts, dtypes, strict=True):
        group = [next(rest).to(dtype) for _ in range(count)]
        scaled = group if factor == 1.0 else [term * factor for term in group]
        sums.append(reduce(torch.add, scaled))
    return sums


def _parts(cuts: Sequence[Cut], dtype: torch.dtype, tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor, seen as flat, to parts of it."""
    # Each part is a tensor of its own, also one that is the whole.
    return [part.clone() for part in _cut(tensor, cuts, dtype)]


def _cut(tensor: torch.Tensor, cuts: Sequence[Cut], dtype: torch.dtype) -> list[torch.Tensor]:
    flat = tensor.reshape(-1).to(dtype)
    return [flat[start : start + prod(shape)].view(shape) for start, shape in cuts]


def sum_gradients(
    programs: Programs,
    groups: Sequence[Sequence[Buffer]],
    dtypes: Sequence[torch.dtype],
    factor: float = 1.0,
) -> list[Buffer]:
    """The sum of each group of buffers, each times a factor; started, not waited for.

    Narrower terms are widened before they are added. The last term of a group is spent: the sum may
    take its memory.
    """
    spec = programs.backend.spec
    results = [group[0] for group in groups]
    computed = [
        i
        for i, (group, dtype) in enumerate(zip(groups, dtypes, strict=True))
        if len(group) > 1 or factor != 1.0 or spec(group[0]).dtype != dtype
    ]
    if not computed:
        return results
    counts = tuple(len(groups[i]) for i in computed)
    terms = [term for i in computed for term in groups[i]]
    settings = (counts, factor, tuple(dtypes[i] for i in computed))
    ends = (end - 1 for end in accumulate(counts))
    spent = [e for e, i in zip(ends, computed, strict=True) if spec(terms[e]).dtype == dtypes[i]]
    totals = programs.run("sums of gradients", _sums, settings, terms, spent)
    for index, total in zip(computed, totals, strict=True):
        results[index] = total
    return results


def cut_gradients(
    programs: Programs, value: torch.Tensor | Buffer, cuts: Sequence[Cut], dtype: torch.dtype
) -> list[Buffer]:
    """Parts of a tensor on the host or of a buffer, on the device; elements count in order."""
    if not cuts:
        return []
    if isinstance(value, torch.Tensor) and value.is_cpu:
        return programs.backend.put(_cut(value, cuts, dtype))
    settings = (tuple(cuts), dtype)
    return programs.run("parts of gradients", _parts, settings, [value])
