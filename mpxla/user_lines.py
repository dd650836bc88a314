"""Tells the user's own files from those of libraries, and finds the user's line that is running.

This module must not know what the user's code does, nor torch.
"""

import functools
import linecache
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

__all__ = ["at_script_line", "is_script_code", "script_line_of", "script_place_of"]

_PACKAGE = Path(__file__).resolve().parent
_LIBRARIES = tuple(
    f"{Path(sysconfig.get_path(kind)).resolve()}/"
    for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders of installed packages, wherever they are: those of the user, of the system."""


@functools.cache
def is_script_code(filename: str) -> bool:
    """Whether a file belongs to the user: not to Python, to installed packages or to mpxla.

    mpxla's own tests play the part of scripts.
    """
    if filename.startswith("<"):
        return filename == "<stdin>"
    path = Path(filename).resolve()
    if path.is_relative_to(_PACKAGE):
        return path.is_relative_to(_PACKAGE / "tests")
    return not str(path).startswith(_LIBRARIES) and _INSTALLED.isdisjoint(path.parts)


def at_script_line() -> str:
    """`file:line: source` of the script's line that is running."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_script_code(filename):
            return _line(filename, frame.f_lineno)
        frame = frame.f_back
    return "the script"


def script_line_of(error: BaseException) -> str:
    """`file:line: source` of the script's innermost line that an error came through."""
    place = script_place_of(error)
    return _line(*place) if place else "the script"


def script_place_of(error: BaseException) -> tuple[str, int] | None:
    """File and line of the script's innermost frame that an error came through."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(f.f_code.co_filename, n) for f, n in frames if is_script_code(f.f_code.co_filename)]
    return lines[-1] if lines else None


def _line(filename: str, number: int) -> str:
    return f"{filename}:{number}: {linecache.getline(filename, number).strip()}"
