"""Errors that the first rank of a pipeline has told the others."""

from collections.abc import Sequence
from typing import Any, cast

from mpxla.errors import MpxlaError

__all__ = ["AnnouncedError", "as_announced", "raise_announced"]


class AnnouncedError(MpxlaError):
    """Marks an error that all ranks of the pipeline raise; nobody has to be told."""


def as_announced(error: MpxlaError) -> MpxlaError:
    """The same error, of a class that also is `AnnouncedError`."""
    own = type(error)
    kind = cast(Any, type)(own.__name__, (own, AnnouncedError), {"__module__": "mpxla.errors"})
    return kind(*error.args)


def raise_announced(message: Sequence[Any]) -> None:
    """Raises the error that an announcement tells, if it does."""
    kind, _, *rest = message
    if kind == "error":
        error_type, text = rest
        raise as_announced(error_type(f"{text} (found on pp_rank 0)"))
