"""Where in the user's code something happens, and errors of tracing in one line of it.

Torch's own texts for such errors hold a page of graph. This module must not know what is traced.
"""

import traceback
from collections.abc import Sequence

from mpxla.errors import CaptureError, MpxlaError

__all__ = ["at_user_line", "explain"]


def explain(error: Exception) -> Exception:
    """One line of the user's code in place of a page of graph; own errors as they are."""
    if isinstance(error, MpxlaError):
        return error
    where = _user_frame(traceback.extract_tb(error.__traceback__))
    place = f" at {where}" if where else ""
    if type(error).__name__ in ("GuardOnDataDependentSymNode", "UserError") or (
        "data-dependent" in str(error)
    ):
        return CaptureError(
            f"The step function depends on a tensor's value in Python{place}. A step is captured "
            f"once as a graph, so `if`, `while`, `int()`, `bool()`, `print()` and indexing with a "
            f"tensor's value are not possible inside it. Use torch.where or masks, or move the "
            f"decision out of the step function; a value that is only returned may use .item()."
        )
    if not isinstance(error, RuntimeError) and not type(error).__module__.startswith("torch"):
        error.add_note(f"mpxla: raised while the step function was captured{place}.")
        return error
    text = str(error).strip().split("\n")[0][:500]
    return CaptureError(
        f"The step function could not be captured{place}: {type(error).__name__}: {text}"
    )


def at_user_line() -> str:
    """` at file:line: source` of the user's line that is running, or nothing."""
    where = _user_frame(traceback.extract_stack())
    return f" at {where}" if where else ""


def _user_frame(frames: Sequence[traceback.FrameSummary]) -> str | None:
    """`file:line: source` of the innermost frame that is neither torch's nor mpxla's."""
    for frame in reversed(frames):
        name = frame.filename.replace("\\", "/")
        outside = (
            "/torch/",
            "/torch_xla/",
            "/mpxla/graph/",
            "/mpxla/runtime/",
            "/mpxla/parallel/",
            "/mpxla/checkpoint/",
            "/contextlib",
            "<",
            "/functools",
        )
        if not any(part in name for part in outside) and "importlib" not in name:
            return f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}"
    return None
