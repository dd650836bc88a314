"""Parameters that share memory without being one: `nn.Parameter(encoder.weight.data)`.

On a host, PyTorch's updates of each change the other. On a device they have memory of their own, as
after `module.to("cuda")`, and so they have in a distributed model: a warning says so.
"""

from collections.abc import Mapping

from torch import nn

from mpxla.graph.memory import sharing
from mpxla.log import warn_once

__all__ = ["warn_of_shared_memory"]


def warn_of_shared_memory(parameters: Mapping[str, nn.Parameter]) -> None:
    """Names parameters of the host, each by its name, that share memory with others."""
    for one, other in sharing(parameters):
        warn_once(
            f"memory of {one} and {other}",
            f"the parameters {one} and {other} share memory, and are two parameters all the same, "
            f"as where {other} is nn.Parameter({one}.data). From the first step on each has memory "
            f"of its own, as after module.to(device), and they are trained separately. To tie "
            f"them, let both be one parameter: {other} = {one}.",
        )
