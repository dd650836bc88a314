"""Tells users what a captured step supposes of values."""

from collections.abc import Collection

from mpxla.graph.stepgraph import Check, StepGraph
from mpxla.log import warn_once

__all__ = ["tell_of_checks", "tell_of_zeros"]

_SUPPOSED = {
    Check.FINITE: ("asks{line} whether values are NaN or infinite", "there were none"),
    Check.ROWS: ("asks{line} whether a mask is true anywhere", "it were"),
    Check.NO_ROWS: ("raises an exception{line} for some values of a mask", "it did not"),
    Check.JOINED: ("joins slices{line}", "they had all rows"),
    Check.COUNTED: ("counts values{line}", "all were below the minlength that it gives"),
}


def tell_of_zeros(line: str, names: Collection[str]) -> None:
    """Says which parameters only a branch uses, which is captured whether it is taken or not."""
    if names:
        first, *others = sorted(names)
        which = f"{first} and {len(others)} more" if others else first
        warn_once(
            f"zeros{line}",
            f"the step function uses {which} only where a mask is true{line}. If it is true "
            f"nowhere in a whole call, PyTorch leaves them without a gradient, and optimizers do "
            f"not touch them; here their gradients are zeros, as after "
            f"zero_grad(set_to_none=False): momentum and weight decay move them.",
        )


def tell_of_checks(step: StepGraph, harmless: Collection[str]) -> None:
    """Says of which values the step supposes something, and waits for, to see that it is so."""
    for print in step.prints:
        if print.check is not None and print.label not in harmless:
            does, supposed = _SUPPOSED[print.check]
            warn_once(
                f"{print.check}{print.label}",
                f"the step function {does.format(line=print.label)}. It is captured as if "
                f"{supposed}, and every step call waits for its results, to see that it was so.",
            )
