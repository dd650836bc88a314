"""Sums over the pipeline ranks that hold the same parameters (tied weights).

The first holder adds, in the order of ranks, and hands the sum back, so that all copies stay equal
bit for bit.
"""

from collections.abc import Sequence

import torch

from mpxla.device.backend import Backend, Buffer
from mpxla.runtime.link import PipelineLink

__all__ = ["sum_over_holders"]


def sum_over_holders(
    value: Buffer, holders: Sequence[int], pp_rank: int, link: PipelineLink, backend: Backend
) -> torch.Tensor | Buffer:
    """The sum of a tensor over pipeline ranks, the same bits on each. All holders must call it.

    Args:
        value: this rank's term, on the host or on the device.
        holders: pipeline ranks, this one among them.
        pp_rank: this rank.
        link: messages between pipeline ranks.
        backend: of the device.
    """
    first, *others = holders
    specs = [backend.spec(value)]
    if pp_rank != first:
        link.send_to(first, [value], "tied")
        (total,) = link.expect_from(first, specs, "tied")()
        return total
    # On the host, where the terms arrive and the total leaves from.
    total = backend.view(value)
    for arrival in [link.expect_from(rank, specs, "tied") for rank in others]:
        (term,) = arrival()
        total = total + backend.view(term)
    link.send_values(others, [total], "tied")
    return total
