"""`smp.debug_print`: values of tensors inside a step, which Python's `print` cannot see.

A step function is captured once, without values. What is to be shown becomes a further result of
the step, which stays on the rank that computes it and is written when the step has run.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.stepgraph import Check, Print
from mpxla.graph.user_code import at_user_line
from mpxla.session import current, is_initialized

__all__ = ["debug_print", "problem_of_checks", "show_prints"]


def debug_print(tensor: torch.Tensor, label: str | None = None) -> None:
    """Prints the value of a tensor inside a step function, of every microbatch.

    The rank that computes the value writes it to standard output when the step has run, with the
    value that the tensor had at this line; other ranks write nothing. It waits for the step, and
    changes neither results nor gradients. Outside of steps it prints at once. (Extension.)

    Args:
        tensor: any tensor, a parameter or an input of the step too.
        label: stands before the value; the line of the call by default.

    Raises:
        CaptureError: inside a step, something else than a tensor.
    """
    if label is None:
        line, _, _ = at_user_line().removeprefix(" at ").partition(": ")
        label = os.path.basename(line)
    recorder = current_recorder()
    if recorder is not None:
        recorder.show(tensor, label)
    else:
        value = tensor.detach().cpu() if isinstance(tensor, torch.Tensor) else tensor  # pyright: ignore[reportUnnecessaryIsInstance]
        _write(label, value)


def show_prints(
    prints: Sequence[Print],
    results: Mapping[tuple[int, int], Any],
    microbatches: Sequence[int],
    view: Callable[[Any], torch.Tensor],
) -> None:
    """Writes what a step has to show on this rank, by results of (result index, microbatch)."""
    for microbatch in microbatches:
        for shown in prints:
            if shown.check is None and (shown.result, microbatch) in results:
                value = view(results[shown.result, microbatch])
                _write(f"{shown.label}, microbatch {microbatch}", value)


def problem_of_checks(
    prints: Sequence[Print],
    function: str,
    microbatches: Sequence[int],
    fetch: Callable[[int], list[torch.Tensor]],
    view: Callable[[Any], torch.Tensor],
) -> str | None:
    """Which check of a step has failed, as a text for the user; waits for the step.

    `fetch` gives the tensors of a result by its index; all ranks of the pipeline call it.
    """
    for check in prints:
        if check.check is None:
            continue
        for microbatch, value in zip(microbatches, fetch(check.result), strict=True):
            if not bool(view(value)):
                text = _FAILED[check.check].format(line=check.label)
                return f"{function}: microbatch {microbatch} has {text}"
    return None


_FAILED = {
    Check.FINITE: "values that are NaN or infinite, for which the step function asks{line}. It was "
    "captured as if there were none, and has run; its gradients are worthless. Look for where they "
    "begin with smp.debug_print or MPXLA_EAGER=1; to train on, use torch.where in place of the "
    "branch.",
    Check.ROWS: "a mask that is true nowhere, for which the step function asks{line}. It was "
    "captured as if there were a row, and has run; its gradients are worthless, since what the "
    "branch decides is more than sums over the rows and writes to them. To train on, compute "
    "without the branch: a sum over no rows is zero, and a write to none changes nothing.",
    Check.NO_ROWS: "a mask for which the step function raises an exception{line}. It was captured "
    "as if it did not, and has run; its gradients are worthless.",
    Check.JOINED: "slices that do not have all rows, where they are joined{line}. The step was "
    "captured as if they had, since it goes on with as many rows, and has run: its results are "
    "worthless. Choose rows by a mask (x[mask]), or write what is computed into zeros.",
    Check.COUNTED: "a value below zero, or not below minlength, where torch.bincount counts{line}. "
    "PyTorch raises, or gives more than minlength places; the step was captured with so many, and "
    "has run: its results are worthless. Give a larger minlength, or leave such values out by a "
    "mask (x[(x >= 0) & (x < n)]).",
}


def _write(title: str, value: Any) -> None:
    rank = f"[rank {current().rank}] " if is_initialized() and current().env.world_size > 1 else ""
    text = repr(value)
    gap = "\n" if "\n" in text else " "
    # One write, so that ranks do not mix within a value.
    sys.stdout.write(f"{rank}{title}:{gap}{text}\n")
    sys.stdout.flush()
