"""Values of a step's inputs, which a capture is given where the step needs them in Python."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from mpxla.errors import CaptureError, MpxlaError
from mpxla.graph.user_code import ValueNeededError
from mpxla.log import get_logger

__all__ = ["Known", "with_values_if_needed"]

T = TypeVar("T")


@dataclass(frozen=True)
class Known:
    """Values of the tensors among the inputs of a step, for one microbatch, on the host.

    `decide_sizes`: whether what masks among them choose has its number of rows, so that inputs
    with another number need another graph.
    """

    values: tuple[torch.Tensor, ...]
    decide_sizes: bool


def with_values_if_needed(
    capture: Callable[[Known | None], T],
    values: Callable[[], Sequence[torch.Tensor]],
    are_needed: bool = False,
    decide_sizes: bool = False,
) -> T:
    """Captures a step without the values of its inputs; if it needs them, with as few as will do.

    Args:
        capture: captures with values, or without; may raise `ValueNeededError`.
        values: gives the tensor leaves of one microbatch.
        are_needed: whether it is known that it needs some.
        decide_sizes: whether it is known that they have to.

    Raises:
        CaptureError: it cannot be captured.
    """
    raised = None
    try:
        if not are_needed:
            return capture(None)
    except ValueNeededError as error:
        get_logger().debug("captured with values of the inputs, since %s", error)
        raised = error.raised
    given = tuple(values())
    with contextlib.suppress(ValueNeededError):
        if not decide_sizes:
            return capture(Known(given, decide_sizes=False))
    try:
        return capture(Known(given, decide_sizes=True))
    except Exception as error:
        if isinstance(raised, CaptureError) and not isinstance(error, MpxlaError):
            raise raised from error  # it says more
        raise
