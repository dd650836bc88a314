"""Tells the script's own code from that of libraries, and finds the script's line that is running.

Only the script sees CUDA names mapped: torch itself and installed packages ask the same questions
for their own ends, and have to be told the truth.
"""

import functools
import linecache
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

__all__ = ["at_script_line", "is_script_code", "script_line_of"]

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(
    f"{Path(sysconfig.get_path(kind)).resolve()}/" for kind in ("stdlib", "purelib", "platlib")
)
_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders of installed packages, wherever they are: those of the user, of the system."""


@functools.cache
def is_script_code(filename: str) -> bool:
    """Whether a file belongs to the user: not to Python, to installed packages or to mpxla."""
    if filename.startswith("<frozen"):
        return False
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
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(f.f_code.co_filename, n) for f, n in frames if is_script_code(f.f_code.co_filename)]
    return _line(*lines[-1]) if lines else "the script"


def _line(filename: str, number: int) -> str:
    return f"{filename}:{number}: {linecache.getline(filename, number).strip()}"
