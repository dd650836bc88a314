"""Parameters that share memory without being one: `nn.Parameter(encoder.weight.data)`.

On a host, PyTorch's updates of each change the other. On a device they have memory of their own, as
after `module.to("cuda")`, and so they have in a distributed model: a warning says so.
"""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn

from mpxla.log import warn_once

__all__ = ["extent", "warn_of_shared_memory"]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes between which a tensor's elements lie."""
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def warn_of_shared_memory(parameters: Mapping[str, nn.Parameter]) -> None:
    """Names parameters of the host, each by its name, that share memory with others."""
    held: defaultdict[int, list[tuple[int, int, str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in parameters.items():
        if parameter.device.type == "cpu" and parameter.numel():
            storage = parameter.untyped_storage().data_ptr()
            held[storage].append((*extent(parameter), name, parameter))
    for places in held.values():
        places.sort(key=lambda place: place[:2])
        for (first, last, one, a), (start, _, other, b) in pairwise(places):
            # Columns of one matrix lie between each other, and share nothing.
            is_certain = start == first or (a.is_contiguous() and b.is_contiguous())
            if start < last and is_certain:
                warn_once(
                    f"memory of {one} and {other}",
                    f"the parameters {one} and {other} share memory, and are two parameters all "
                    f"the same, as where {other} is nn.Parameter({one}.data). "
                    f"From the first step on each has memory of its own, as after "
                    f"module.to(device), and they are trained separately. To tie them, let both "
                    f"be one parameter: {other} = {one}.",
                )
