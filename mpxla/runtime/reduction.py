"""What the engine asks of the reduction of gradients over replicas, whoever does it.

The engine runs one pipeline and knows nothing of other replicas: it is given `Reducers`, hands them
the cut of every training step once, and tells them when a stage's gradients are complete.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from mpxla.runtime.plans.cut import CutStep

__all__ = ["Gradients", "Reducers", "StepReduction"]


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


class Gradients:
    """The gradients of one plan in one call, which may run it in several passes.

    It adds to the gradients of all plans of the call, whose stages are numbered together.

    Attributes:
        is_last: whether the pass that runs is the plan's last one in the call.
        so_far: by stage, what earlier passes have added up.
    """

    def __init__(
        self,
        reduction: StepReduction,
        scale: float,
        whole: dict[int, list[torch.Tensor]],
        first: int,
    ):
        self.scale = scale
        self.is_last = True
        self.so_far: dict[int, list[torch.Tensor]] = {}
        self._reduction, self._whole, self._first = reduction, whole, first

    def start(self, stage: int, gradients: Mapping[int, list[torch.Tensor]]) -> None:
        """Called when a stage's gradients are complete."""
        if stage in gradients:  # it trains something
            self._whole[self._first + stage] = gradients[stage]
        self._reduction.start(self._first + stage, self._whole)

    def keep(self, gradients: dict[int, list[torch.Tensor]]) -> None:
        """Called after a pass, with what it has left."""
        self.so_far = {} if self.is_last else gradients
        if self.is_last:
            self._whole.update((self._first + i, found) for i, found in gradients.items())


class Reducers(Protocol):
    """Gradients and start values of one rank over all replicas, of all models."""

    def equalize(
        self, label: str, parameter_ranks: Mapping[str, tuple[int, ...]], names: Sequence[str]
    ) -> None:
        """Gives all replicas, and all holders of a shared parameter, the same start values.

        All of a model's parameters and buffers come with their ranks; `names` have just been
        placed.
        """
        ...

    def meet(self, what: str, line: str) -> None:
        """Before something, at the user's line, that all replicas do at once, or none.

        Raises:
            RankMismatch: another replica does something else.
        """
        ...

    def note_written(self, names: Sequence[str]) -> None:
        """After a call that does not train: what it has written, which other replicas may lack."""
        ...

    def prepare(
        self, cuts: Sequence[CutStep], num_microbatches: int, exchanges: Sequence[str]
    ) -> StepReduction:
        """Makes the reduction of a training step. All ranks call it for the same steps.

        Args:
            cuts: the step in stages; more than one where its microbatches go different ways. The
                gradients of the stages of all of them count, numbered one cut after the other.
            num_microbatches: of the call.
            exchanges: what programs exchange with other replicas while they run, in lines.
        """
        ...
