"""Numbers of the model where a step function leaves them in Python, once they are known.

This module must not know how a step is run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpxla.runtime.outputs import Part

__all__ = ["leave_numbers"]


def leave_numbers(
    parts: Sequence[Part], publish: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> None:
    """Gives places in Python what all microbatches leave there (`graph/recorded.py`).

    Also those of other ranks of a tensor-parallel group, which are counted, too.
    """
    turns: list[tuple[int, Part, list[Any]]] = []
    for part in (part for part in parts if part.records):
        columns = [[v.item() for v in publish(part.results[i]())] for i in part.numbers]
        rows = zip(*columns, strict=True) if columns else ([] for _ in part.microbatches)
        turns += ((n, part, list(row)) for n, row in zip(part.microbatches, rows, strict=True))
    reads = {read.name: read for _, part, _ in turns for read in part.records}
    more = {name: list[Any]() for name, read in reads.items() if read.is_more}
    left = {name: read.now() for name, read in reads.items()}
    for _, part, results in sorted(turns, key=lambda turn: turn[0]):
        after = {read.name: read.after(results, left) for read in part.records}
        for name, value in after.items():
            if name in more:
                more[name] += value
            else:
                left[name] = value
    for name, read in reads.items():
        if name in more:
            read.now().extend(more[name])
        elif read.put is not None:
            read.put(left[name])
