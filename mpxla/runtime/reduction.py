"""What the engine asks of the reduction of gradients over replicas, whoever does it.

The engine runs one pipeline and knows nothing of other replicas: it is given `Reducers`, hands them
the cut of every training step once, and tells them when a stage's gradients are complete.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from mpxla.runtime.cut import CutStep

__all__ = ["Reducers", "StepReduction"]


class StepReduction(Protocol):
    """The reduction of one training step's gradients, prepared once and used in every call.

    Gradients are those of this rank: by stage, in the order of the stage's trained parameters.
    """

    @property
    def objective_scale(self) -> float:
        """What the gradient of every microbatch's objective is; asked for in every call."""
        ...

    def begin(self) -> None:
        """Called before the first action of every call."""
        ...

    def start(self, stage: int, gradients: Mapping[int, list[torch.Tensor]]) -> None:
        """Called when a stage's gradients are complete; must not wait for them."""
        ...

    def finish(self, gradients: Mapping[int, list[torch.Tensor]]) -> None:
        """Called after the last action: leaves the gradients where optimizers look for them."""
        ...


class Reducers(Protocol):
    """Gradients and start values of one rank over all replicas, of all models."""

    def equalize(
        self, label: str, parameter_ranks: Mapping[str, tuple[int, ...]], names: Sequence[str]
    ) -> None:
        """Gives all replicas, and all holders of a shared parameter, the same start values.

        Args:
            label: of a model.
            parameter_ranks: pipeline ranks that hold each of its parameters and buffers.
            names: of those that have just been placed.
        """
        ...

    def meet(self, what: str, line: str) -> None:
        """Before something that all replicas do at once, or none.

        Args:
            what: it is.
            line: the user's.

        Raises:
            RankMismatch: another replica does something else.
        """
        ...

    def prepare(self, cut: CutStep, num_microbatches: int) -> StepReduction:
        """Makes the reduction of a training step. All ranks call it for the same steps."""
        ...
