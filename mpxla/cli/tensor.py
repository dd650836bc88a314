"""A factory's model as one rank of a tensor-parallel group has it, for `python -m mpxla plan`."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mpxla.cli.factory import capture_factory
from mpxla.errors import MpxlaError
from mpxla.graph.sequence import divide_sequences
from mpxla.graph.stepgraph import StepGraph
from mpxla.graph.varying import mark_varying
from mpxla.graph.vocabulary import divide_losses
from mpxla.nn.distribute import first_part

__all__ = ["capture_part"]


def capture_part(
    model: nn.Module, inputs: Sequence[Any], function: Callable[..., Any], size: int
) -> StepGraph:
    """Captures one microbatch, split over a group with `optimize: "memory"`.

    Args:
        model: the model; changed in place.
        inputs: arguments of one microbatch.
        function: step function or loss.
        size: ranks of the group.

    Raises:
        MpxlaError: nothing of the model can be split.
        CaptureError: it cannot be captured.
    """
    shards = first_part(model, size)
    if not shards:
        raise MpxlaError(
            f"--tp {size}: nothing of the model can be split (the lines above say why). Give it a "
            f"_tp_plan, or build it of layers of smp.nn."
        )
    step = divide_losses(capture_factory(model, inputs, function))
    return divide_sequences(mark_varying(step, set(shards), 0, size), 0, size)
