"""What a step call returns: `StepOutput`, and how results reach every rank of a pipeline.

The rank that computes results sends them to the other pipeline ranks in one packed message at the
end of the step; a receiving rank waits for it only when a value is looked at.

Reductions over microbatches are PyTorch's own on what users see, as if users had written them: one
operator on a few small values, for which a program would be compiled per shape and number. On the
CPU and on CUDA the tensors of jax are ordinary ones; lazy ones of torch_xla are started at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from mpxla.errors import StepError
from mpxla.graph.stepgraph import ResultLeaf

__all__ = ["StepOutput", "build_outputs"]


class StepOutput:
    """All microbatches' versions of one tensor that a step function returned.

    The tensors are detached and live on the rank's device. Shapes below are those of one
    microbatch. (SMP API reference, "StepOutput".)
    """

    def __init__(
        self, fetch: Callable[[], list[torch.Tensor]], start: Callable[[list[torch.Tensor]], Any]
    ):
        self._fetch = fetch
        self._start = start
        self._outputs: list[torch.Tensor] | None = None

    @property
    def outputs(self) -> list[torch.Tensor]:
        """One tensor per microbatch, in order."""
        if self._outputs is None:
            self._outputs = self._fetch()
        return self._outputs

    def reduce_mean(self) -> torch.Tensor:
        """Mean over microbatches, of the shape of one microbatch's tensor; of integers in float."""
        stacked = torch.stack(self.outputs)
        if not (stacked.is_floating_point() or stacked.is_complex()):
            stacked = stacked.to(torch.get_default_dtype())
        return self._started(stacked.mean(dim=0))

    def reduce_sum(self) -> torch.Tensor:
        """Sum over microbatches, of the shape of one microbatch's tensor."""
        return self._started(torch.stack(self.outputs).sum(dim=0))

    def concat(self) -> torch.Tensor:
        """Concatenation along axis 0: the tensor of the whole batch.

        Raises:
            StepError: the step function returned a scalar, which has no axis.
        """
        if self.outputs[0].dim() == 0:
            raise StepError(
                "StepOutput.concat: the step function returned a scalar, which has no batch axis. "
                "Use stack(), reduce_mean() or reduce_sum()."
            )
        return self._started(torch.cat(self.outputs, dim=0))

    def stack(self) -> torch.Tensor:
        """Stack of shape [num_microbatches, ...]."""
        return self._started(torch.stack(self.outputs, dim=0))

    def _started(self, value: torch.Tensor) -> torch.Tensor:
        """Starts the computation now: pending values would join later programs."""
        self._start([value])
        return value

    def __repr__(self) -> str:
        if self._outputs is None:
            return "StepOutput(not read yet)"
        first = self._outputs[0]
        return f"StepOutput({len(self._outputs)} x {first.dtype}{list(first.shape)})"


def build_outputs(
    leaves: Sequence[ResultLeaf],
    structure: Any,
    num_microbatches: int,
    fetch: Callable[[int], list[torch.Tensor]],
    start: Callable[[list[torch.Tensor]], Any],
) -> Any:
    """Puts results in the structure that the step function returned.

    Args:
        leaves: the returned leaves.
        structure: their pytree structure.
        num_microbatches: how many microbatches the step had.
        fetch: result index -> its tensors, one per microbatch; may wait.
        start: starts what is pending of tensors.

    Returns:
        The structure with a `StepOutput` for every tensor, a list over microbatches for every
        Python number, and all other leaves as they were.
    """

    def value_of(leaf: ResultLeaf) -> Any:
        if leaf.output is None:
            return [leaf.value] * num_microbatches if leaf.is_number else leaf.value
        if leaf.is_number:
            return [tensor.item() for tensor in fetch(leaf.output)]
        index = leaf.output
        return StepOutput(lambda: fetch(index), start)

    return pytree.tree_unflatten([value_of(leaf) for leaf in leaves], structure)
