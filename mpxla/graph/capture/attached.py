"""Tensors with a gradient that a step leaves where the next microbatch computes its loss with them.

    self.scaled = 2 * self.weight     in a forward that has read `self.scaled` before

Buffers and attributes of modules carry values from one microbatch to the next. In plain PyTorch
they carry the graph as well: the next backward flows back into it, or raises an exception where it
has been freed. Here a microbatch is over when its backward is, and the gradient would be missing.

This module must not know how a step is captured or run.
"""

from collections.abc import Mapping

from mpxla.errors import CaptureError
from mpxla.graph.stepgraph import StepGraph

__all__ = ["refuse_attached"]


def refuse_attached(step: StepGraph, attached: Mapping[str, str]) -> None:
    """Checks that no gradient would have to flow into the microbatch or call before.

    Args:
        step: that was captured.
        attached: what it leaves with a gradient: names of buffers -> what users call them.

    Raises:
        CaptureError: one would.
    """
    for name, called in attached.items():
        if step.would_differentiate(name):
            raise CaptureError(
                f"The step function leaves a tensor in {called} that depends on parameters, and "
                f"the next microbatch computes its loss with it: the gradient would have to flow "
                f"back into the one before, which is over. Leave it detached (.detach()), or "
                f"compute it anew in each call before it is used."
            )
