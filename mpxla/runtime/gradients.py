"""Sums over the pipeline ranks that hold the same parameters (tied weights).

The first holder adds, in the order of ranks, and hands the sum back, so that all copies stay equal
bit for bit.
"""

from collections.abc import Sequence

import torch

from mpxla.device.backend import Backend
from mpxla.runtime.link import PipelineLink
from mpxla.stage.spec import TensorSpec

__all__ = ["sum_over_holders"]


def sum_over_holders(
    tensor: torch.Tensor, holders: Sequence[int], pp_rank: int, link: PipelineLink, backend: Backend
) -> torch.Tensor:
    """The sum of a tensor over pipeline ranks, the same bits on each. All holders must call it.

    Args:
        tensor: this rank's term, on the host or on the device.
        holders: pipeline ranks, this one among them.
        pp_rank: this rank.
        link: messages between pipeline ranks.
        backend: of the device.
    """
    first, *others = holders
    specs = [TensorSpec.of(tensor)]
    if pp_rank != first:
        link.send_to(first, [tensor], "tied")
        (total,) = link.expect_from(first, specs, "tied")()
        return total
    total = tensor
    for arrival in [link.expect_from(rank, specs, "tied") for rank in others]:
        (term,) = arrival()
        total = total + term.to(total.device)
    backend.adopt([total])
    link.send_values(others, [total], "tied")
    return total
