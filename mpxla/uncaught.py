"""How an error is shown that ends the script: where the user's code met it, in full on one rank.

All ranks tend to raise the same error at the same line, and errors of mpxla say in their text what
happened and what to do: frames of libraries between would only hide it. So such errors show the
user's frames alone, and a rank that another one has forestalled says one line. Errors of the user's
own code and of other libraries keep the frames below the user's innermost one too.

This module must not know how ranks talk: it is given a function.
"""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from mpxla.errors import CaptureError, MpxlaError, PeerFailure
from mpxla.user_lines import is_script_code, script_place_of

__all__ = ["UncaughtErrors", "format_error", "show_in_notebook"]

_PACKAGE = Path(__file__).parent
_MOST_CHARACTERS = 300
_OF_ABSENT = "`variable` and `tensor` have incompatible tensor type"
"""What torch says of `own.data = other.data`, which nothing of ours sees before it fails."""
Claim = Callable[[str], int]
"""Given the name of an error, the rank that was the first to say that it shows it."""


class UncaughtErrors:
    """A `sys.excepthook`.

    Args:
        rank: of this process.
        world_size: number of ranks.
        is_complete: show every frame on every rank.

    Attributes:
        claim: see `Claim`; None where ranks cannot ask each other.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, is_complete: bool = False):
        self.rank = rank
        self.world_size = world_size
        self.is_complete = is_complete
        self.claim: Claim | None = None

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Writes the error to standard error."""
        text = format_error(error, self.is_complete)
        other = None if self.is_complete else self._shown_by(error)
        if other is not None:
            text = _one_line(error, other)
        prefix = f"[rank{self.rank}]: " if self.world_size > 1 else ""
        # One write, so that ranks do not interleave.
        sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.rstrip("\n").split("\n")))
        sys.stderr.flush()

    def _shown_by(self, error: BaseException) -> int | None:
        """The other rank that shows this error in full; None if this one has to."""
        if self.world_size == 1:
            return None
        if isinstance(error, PeerFailure):
            if error.raised_by not in (None, self.rank):
                return error.raised_by
            keys = ["PeerFailure"]
        else:
            # What follows from it on other ranks is of less interest.
            keys = ["PeerFailure", f"{type(error).__name__} at {script_place_of(error)}"]
        if self.claim is None:
            return None
        found = self.rank
        for key in keys:
            try:
                found = self.claim(key)
            except Exception:  # who could have been asked is gone; better twice than never
                found = self.rank
        return None if found == self.rank else found


def show_in_notebook(shown: UncaughtErrors) -> None:
    """Lets it show errors of mpxla in IPython too, which does not ask `sys.excepthook`.

    Not where somebody else has asked IPython to show some errors.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or shell.custom_exceptions:
        return

    def show(_: Any, kind: Any, error: Any, trace: Any, tb_offset: Any = None) -> None:
        shown(kind, error, trace)

    shell.set_custom_exc((MpxlaError,), show)


def format_error(error: BaseException, is_complete: bool = False) -> str:
    """The traceback as text.

    Args:
        error: that was raised.
        is_complete: with all frames.
    """
    _add_advice(error)
    shown = traceback.TracebackException.from_exception(error)
    if not is_complete:
        _shorten(shown, error)
    return "".join(shown.format())


def _add_advice(error: BaseException) -> None:
    """Says what to do, where torch or Python has met a tensor that is on another rank."""
    if isinstance(error, RuntimeError) and _OF_ABSENT in str(error):
        error.add_note(
            "The tensor that was assigned to .data may be a parameter that has no values here: its "
            "device is meta where it is on another pipeline rank, or divided over ranks. Skip "
            "parameters whose device is meta, or read whole values from model.state_dict()."
        )
    frames = traceback.extract_tb(error.__traceback__)
    is_of_none = isinstance(error, (AttributeError, TypeError)) and "NoneType" in str(error)
    if is_of_none and frames and ".grad" in (frames[-1].line or ""):
        error.add_note(
            "A parameter's gradient is None where another rank updates it (its device is meta), "
            "and where no loss has reached it. Skip it (if p.grad is not None), or loop over "
            "model.local_parameters(). torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) "
            "returns the norm over all ranks."
        )


def _shorten(shown: traceback.TracebackException, error: BaseException) -> None:
    """Leaves out frames that are not the user's."""
    is_users = [is_script_code(frame.filename) for frame in shown.stack]
    if not any(is_users):
        return
    kept = [frame for frame, own in zip(shown.stack, is_users, strict=True) if own]
    if not (isinstance(error, KeyboardInterrupt) or _is_answer(error, shown.stack)):
        # What the user's innermost line has called; between the user's lines may be a capture.
        kept += list(shown.stack)[len(is_users) - is_users[::-1].index(True) :]
    for name in ("__cause__", "__context__"):
        before, inner = getattr(error, name), getattr(shown, name)
        if before is None or inner is None:
            continue
        # What an answer of mpxla was made of is in its text, unless the user's code raised it.
        users = [frame for frame in inner.stack if is_script_code(frame.filename)]
        if isinstance(error, CaptureError):
            kept += users  # which way to the line; below it are only pages of torch
            setattr(shown, name, None)
        elif _is_answer(error, shown.stack) and not users:
            setattr(shown, name, None)
        else:
            _shorten(inner, before)
    shown.stack = traceback.StackSummary.from_list(kept)


def _is_answer(error: BaseException, frames: traceback.StackSummary) -> bool:
    """Whether mpxla raised it on purpose, for the user to read."""
    innermost = frames[-1]
    is_raised_here = (innermost.line or "").startswith("raise ")
    is_ours = innermost.filename.startswith(f"{_PACKAGE}/")
    return isinstance(error, MpxlaError) or (is_ours and is_raised_here)


def _one_line(error: BaseException, other: int) -> str:
    place = script_place_of(error)
    text = " ".join(str(error).split("\n")[0].split())
    where = f" at {place[0]}:{place[1]}" if place else ""
    if place and text.startswith(f"{place[0]}:{place[1]}:"):  # errors of the launcher begin so
        where = ""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]} ..."
    return f"{type(error).__name__}{where}: {text} (rank {other} shows its error in full)"
