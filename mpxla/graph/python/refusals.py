"""What users are told of values that a step leaves in attributes."""

from mpxla.errors import CaptureError
from mpxla.log import warn_once

__all__ = ["LeftTensorError", "refusal", "refusal_of_number", "warn_changed", "warn_gone"]


class LeftTensorError(CaptureError):
    """A step leaves a tensor where it reads the next one."""


def refusal(name: str, line: str) -> LeftTensorError:
    """The error of a tensor that the step leaves where it reads the next one."""
    return LeftTensorError(
        f"The step function reads {name}, and gives it a tensor{line}, which the next microbatch "
        f"or step would read. A step carries tensors in attributes of the modules that "
        f"smp.DistributedModel has wrapped, and only there: keep it in one of them, or make it a "
        f"buffer there (register_buffer with its shape, then self.name.copy_(value)), or return it "
        f"and pass it to the next call as an argument."
    )


def refusal_of_number(name: str, line: str = "") -> CaptureError:
    """The error of a plain value by which the step goes, and which it changes."""
    return CaptureError(
        f"The step function computes with {name}, and changes it{line}. It is captured once per "
        f"program, so that the number would stay. Count in a buffer (register_buffer with a "
        f"tensor, then self.name += 1), by which it may compute and branch; or change it outside "
        f"of the step function, or pass it as an argument."
    )


def warn_changed(name: str, line: str = "") -> None:
    """Tells the user of what a step changes once for each program."""
    warn_once(
        f"changed attribute {name}",
        f"the step function reads and changes {name}{line}. It is captured once per program, so "
        f"that the change happens then, and not in every step or microbatch. Make it a buffer "
        f"(register_buffer), or change it outside of the step function.",
    )


def warn_gone(name: str) -> None:
    """Tells the user that tensors in an attribute are there during a step only."""
    warn_once(
        f"attribute {name}",
        f"forward puts tensors into {name}. A step function may use them, but they are gone when "
        f"it returns: return what you want to see, and register_buffer what one step is to keep "
        f"for the next.",
    )
