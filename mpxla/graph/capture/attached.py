"""Tensors with a gradient that a step leaves where the next microbatch computes its loss with them.

    self.scaled = 2 * self.weight     in a forward that has read `self.scaled` before

Buffers and attributes of modules carry values from one microbatch to the next. In plain PyTorch
they carry the graph as well: the next backward flows back into it, or raises an exception where it
has been freed. Here a microbatch is over when its backward is, and the gradient would be missing.

This module must not know how a step is captured or run.
"""

from collections.abc import Mapping

import torch

from mpxla.errors import CaptureError
from mpxla.graph.stepgraph import StepGraph

__all__ = ["Attached"]


class Attached:
    """What one run of a step function leaves in buffers, and in what is carried as they are."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._called: dict[str, str] = {}
        # Where a tensor that was found in one place is left in another: a queue that moves on.
        self._moved: dict[str, str] = {}

    def find(self, name: str, buffer: torch.Tensor | None) -> None:
        """Notes what the function finds."""
        self._names[id(buffer)] = name

    def leave(self, called: str, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        """Notes what it leaves in the place of a buffer, and what users call that place."""
        name = self._names.get(id(old))
        if name is None or old is None or new is None:  # it was not there before
            return
        is_kept_leaf = new is old and new.is_leaf  # its gradient flows no further than to .grad
        if new.requires_grad and not is_kept_leaf:
            self._called[name] = called
        elif new is not old and id(new) in self._names:
            self._moved[name] = self._names[id(new)]

    def check(self, step: StepGraph, canonical_names: Mapping[str, str]) -> None:
        """Checks that no gradient would have to flow into a microbatch or call before.

        Raises:
            CaptureError: one would.
        """
        called = dict(self._called)
        for _ in self._moved:  # as far as one can move
            called |= {n: called[old] for n, old in self._moved.items() if old in called}
        for name, place in called.items():
            if step.would_differentiate(canonical_names[name]):
                raise CaptureError(
                    f"The step function leaves a tensor in {place} that depends on parameters, and "
                    f"the next microbatch computes its loss with it: the gradient would have to "
                    f"flow back into the one before, which is over. Leave it detached "
                    f"(.detach()), or compute it anew in each call before it is used."
                )
